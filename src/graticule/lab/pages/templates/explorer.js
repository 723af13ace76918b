// Fills in the plots of the page: decodes the maps, and redraws them when a choice or the token changes.
"use strict";
const NOTHING = 255;
const about = JSON.parse(document.getElementById("described").textContent);
const $ = (id) => document.getElementById(id);
// the token is stored as shares, so that models, layers and sizes with other grids show the same position
const state = { size: 0, image: 0, layer: 0, head: 0, query: 0, y: 0.5, x: 0.5, held: false };
let bytes, Bokeh2d;

async function decoded() {
  const packed = Uint8Array.from(atob($("maps").textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

function model(name) {
  for (const one of Bokeh.documents) {
    const found = one.get_model_by_name(name);
    if (found != null) return found;
  }
  return null;
}

const sizeOf = (number) => about.models[number].sizes[Math.min(state.size, about.models[number].sizes.length - 1)];
const layerOf = (number) => Math.min(state.layer, sizeOf(number).grids.length - 1);
const product = (shape) => shape[0] * shape[1];
const flat = ([y, x], [, width]) => y * width + x;
const part = (share, side) => Math.min(side - 1, Math.floor(share * side));
const place = (grid) => [part(state.y, grid[0]), part(state.x, grid[1])];
const gridOf = (number, layer = layerOf(number)) => sizeOf(number).grids[layer];
const words = ([y, x]) => `row ${y}, column ${x}`;

function mapsOf(number, kind) {
  return sizeOf(number).maps.find((one) => one.kind === kind && one.layer === layerOf(number) && (one.image === null || one.image === state.image));
}

// Returns the values of `count` codes from `start` on, in the range of row `row`.
function values(one, start, count, row) {
  const [low, high] = new Float32Array(bytes.buffer, one.ends + 8 * row, 2);
  const found = new Float32Array(count);
  for (let i = 0; i < count; i++) {
    const code = bytes[one.codes + start + i];
    found[i] = code === NOTHING ? NaN : low + (code / about.steps) * (high - low);
  }
  return found;
}

// Returns the values of a map for all keys: {values, shape, token: place of the query in it or null, where}.
function shown(number, one, head) {
  const layer = gridOf(number, one.layer), token = place(layer);
  const queries = one.queries, shape = one.keys, keys = product(shape), sides = queries.join(" × ");
  if (one.windows) {
    const [count, side, at] = one.windows;
    const tokens = new Int32Array(bytes.buffer, at, count * side);
    const found = tokens.indexOf(flat(token, layer));
    const within = values(one, (head * count * side + found) * side, side, head * count * side + found);
    const image = new Float32Array(product(layer)).fill(NaN);
    const first = found - (found % side);
    for (let i = 0; i < side; i++) if (tokens[first + i] >= 0) image[tokens[first + i]] = within[i];
    return { values: image, shape: layer, token, where: `within its window of ${sides}` };
  }
  const inside = queries.join() !== layer.join();  // whether positions are those within a window
  const query = token.map((index, axis) => index % queries[axis]);
  const where = inside ? `at ${words(query)} of a window of ${sides}` : "";
  if (one.displacement) {
    const [height, width] = queries, [row, column] = query;
    const wide = 2 * width - 1, table = values(one, head * (2 * height - 1) * wide, (2 * height - 1) * wide, head);
    const image = new Float32Array(keys);
    for (let i = 0; i < height; i++)
      for (let j = 0; j < width; j++) image[i * width + j] = table[(row - i + height - 1) * wide + column - j + width - 1];
    return { values: image, shape, token: query, where };
  }
  const prefix = one.prefix > 0 && state.query > 0 && state.query <= one.prefix;
  const index = head * (one.prefix + product(queries)) + (prefix ? state.query - 1 : one.prefix + flat(query, queries));
  const same = shape.join() === queries.join();
  return {
    values: values(one, index * keys, keys, index),
    shape,
    token: same && !prefix ? query : null,
    where: prefix ? `of prefix token ${state.query}` : where,
  };
}

function range(found) {
  let low = Infinity, high = -Infinity;
  for (const value of found) if (!Number.isNaN(value)) { if (value < low) low = value; if (value > high) high = value; }
  return [low, high];
}

const number4 = (value) => value.toPrecision(3).replace("-", "−");

// Returns the ends of the color scale of a panel, over all panels of its kind, in its model or in both if their grids
// are equal: attention over more tokens is smaller, so a common scale would show one of the models in one color.
function limitsOf(panel, panels) {
  const of = (kind) => (kind === "without" ? "attention" : kind), kind = of(panel.kind);
  if (kind === "correlation" || kind === "rotary") return [-1, 1];
  const shared = $("shared") !== null && $("shared").checked;
  const grid = (one) => one.found.shape.join();
  const compared = (one) => one.number === panel.number || (shared && grid(one) === grid(panel));
  const ends = panels.filter((one) => of(one.kind) === kind && compared(one)).map((one) => range(one.found.values));
  const low = kind === "attention" ? 0 : Math.min(...ends.map((end) => end[0])), high = Math.max(...ends.map((end) => end[1]));
  return high > low ? [low, high] : [low, low + 1];
}

function draw() {
  const panels = [];
  about.models.forEach((_, number) => {
    drawImage(number, sizeOf(number), gridOf(number));
    for (const kind of Object.keys(about.kinds)) {
      if ($(`plot-${number}-${kind}`) === null) continue;
      const one = mapsOf(number, kind);
      if (one === undefined) {
        fill(`${number}-${kind}`, null);
        $(`caption-${number}-${kind}`).textContent = "Nothing in this layer.";
        continue;
      }
      const head = Math.min(state.head, one.heads.length - 1);
      panels.push({ name: `${number}-${kind}`, number, kind, one, head, found: shown(number, one, head) });
    }
  });
  for (const panel of panels) {
    fill(panel.name, panel.found, limitsOf(panel, panels));
    caption(panel);
  }
  page.panels = panels;
  describe();
}

function drawImage(number, size, grid) {
  const name = `${number}-image`, plot = model(name), [height, width] = grid, token = place(grid);
  fit(name, plot, height, width);
  const image = size.images[Math.min(state.image, size.images.length - 1)];
  const source = model(`${name} image`), drawn = `${image.length} ${image.slice(-64)} ${grid}`;
  if (plot.__drawn !== drawn) {
    plot.__drawn = drawn;
    source.data = { url: [image], y: [0], w: [width], h: [height] };
    const lines = { x0: [], y0: [], x1: [], y1: [] };
    const line = (x0, y0, x1, y1) => { lines.x0.push(x0); lines.y0.push(y0); lines.x1.push(x1); lines.y1.push(y1); };
    for (let i = 1; i < height; i++) line(0, i, width, i);
    for (let j = 1; j < width; j++) line(j, 0, j, height);
    model(`${name} lines`).data = lines;
  }
  mark(name, token);
  $(`caption-${name}`).textContent = `${size.pixels.join(" × ")} pixels; ${grid.join(" × ")} tokens in layer ${layerOf(number)}; the token is at ${words(token)}.`;
}

function mark(name, token) {
  model(`${name} token`).data = token === null ? { x: [], y: [] } : { x: [token[1] + 0.5], y: [token[0] + 0.5] };
}

// Gives a plot the width of its column and the proportions of its grid.
function fit(name, plot, height, width) {
  const room = $(`plot-${name}`).clientWidth - 26;
  const across = Math.max(80, Math.min(room, 340, (340 * width) / height)), down = (across * height) / width;
  if (plot.frame_width !== Math.round(across) || plot.frame_height !== Math.round(down))
    plot.setv({ frame_width: Math.round(across), frame_height: Math.round(down) });
  if (plot.x_range.end !== width) plot.x_range.end = width;
  if (plot.y_range.start !== height) plot.y_range.start = height;
}

function fill(name, found, limits) {
  const plot = model(name), source = model(`${name} values`);
  if (found === null) {
    source.data = { image: [], w: [], h: [] };
    return mark(name, null);
  }
  const [height, width] = found.shape;
  fit(name, plot, height, width);
  const colors = model(`${name} colors`);
  if (colors.low !== limits[0] || colors.high !== limits[1]) colors.setv({ low: limits[0], high: limits[1] });
  source.data = { image: [new Bokeh2d(found.values, [height, width])], w: [width], h: [height] };
  mark(name, found.token);
}

function caption(panel, under = null) {
  const { one, found, head, kind, name } = panel, [low, high] = range(found.values), [, width] = found.shape;
  const most = found.values.indexOf(high), largest = words([Math.floor(most / width), most % width]);
  let text = `Layer ${one.layer}, ${one.heads[head]}${found.where ? ", " + found.where : ""}: from ${number4(low)} to ${number4(high)}, the largest at ${largest}.`;
  if (kind === "attention" || kind === "without") text += ` ${(100 * found.values.reduce((sum, v) => (Number.isNaN(v) ? sum : sum + v), 0)).toFixed(0)} % is on patches.`;
  if (under !== null) text += ` Here: ${number4(found.values[flat(under, found.shape)])} at ${words(under)}.`;
  $(`caption-${name}`).textContent = text;
}

function describe() {
  const [height, width] = gridOf(0), [y, x] = place(gridOf(0));
  Object.assign($("row"), { max: height - 1 });
  Object.assign($("column"), { max: width - 1 });
  if (document.activeElement !== $("row")) $("row").value = y;
  if (document.activeElement !== $("column")) $("column").value = x;
  const depth = Math.max(...about.models.map((_, number) => sizeOf(number).grids.length));
  $("layer").max = depth - 1;
  $("layer").value = state.layer;
  $("layer-name").textContent = `Layer ${state.layer} of 0 to ${depth - 1}`;
  $("layer").setAttribute("aria-valuetext", `layer ${state.layer} of 0 to ${depth - 1}`);
  $("state").textContent = `Token at ${words([y, x])}${state.held ? ", held" : ""}; layer ${state.layer}.`;
}

function options(select, names, chosen) {
  const old = Array.from(select.options, (one) => one.textContent);
  if (old.join("\n") !== names.join("\n")) select.replaceChildren(...names.map((name, index) => new Option(name, index)));
  select.value = String(Math.min(chosen, names.length - 1));
}

// Fills the lists of choices: sizes, images, heads of the layer, prefix tokens.
function list() {
  const sizes = Math.max(...about.models.map((one) => one.sizes.length));
  options($("size"), Array.from({ length: sizes }, (_, at) => {
    const each = about.models.map((one) => one.sizes[Math.min(at, one.sizes.length - 1)].pixels.join(" × "));
    return each[1] === undefined || each[0] === each[1] ? each[0] : each.join(" and ");
  }), state.size);
  const images = Math.max(...about.models.map((_, number) => sizeOf(number).images.length));
  options($("image"), Array.from({ length: images }, (_, at) => `image ${at}`), state.image);
  $("image-label").hidden = images < 2;
  const here = about.models.flatMap((_, number) => sizeOf(number).maps.filter((one) => one.layer === layerOf(number)));
  const longest = here.reduce((names, one) => (one.heads.length > names.length ? one.heads : names), ["all heads"]);
  options($("head"), longest, state.head);
  const prefix = Math.max(0, ...here.map((one) => one.prefix));
  options($("query"), ["the patch", ...Array.from({ length: prefix }, (_, at) => `prefix token ${at}`)], state.query);
  $("query-label").hidden = prefix === 0;
  about.models.forEach((_, number) => { $(`notes-${number}`).textContent = sizeOf(number).notes.join(" "); });
}

let waiting = false;
function redraw() {  // once per frame, however many events there are
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; draw(); });
}

function moveTo(y, x, [height, width]) {
  if (y < 0 || x < 0 || y >= height || x >= width) return;
  state.y = (y + 0.5) / height;
  state.x = (x + 0.5) / width;
  redraw();
}

// Returns the place of the pointer in a plot with a grid; null outside.
function under(event, [height, width]) {
  const y = Math.floor(event.y), x = Math.floor(event.x);
  return y >= 0 && x >= 0 && y < height && x < width ? [y, x] : null;
}

function listen() {
  for (const id of ["size", "image", "head", "query"])
    $(id).addEventListener("change", () => { state[id] = Number($(id).value); list(); redraw(); });
  $("layer").addEventListener("input", () => { state.layer = Number($("layer").value); list(); redraw(); });
  for (const id of ["row", "column"])
    $(id).addEventListener("input", () => {
      const grid = gridOf(0), [y, x] = place(grid), given = Number($(id).value);
      if (Number.isInteger(given)) { state.held = true; moveTo(id === "row" ? given : y, id === "column" ? given : x, grid); }
    });
  if ($("shared") !== null) $("shared").addEventListener("change", redraw);
  $("choices").addEventListener("submit", (event) => event.preventDefault());
  about.models.forEach((_, number) => {
    const grid = () => gridOf(number);
    const image = model(`${number}-image`);
    image.on_event("mousemove", (event) => { const at = under(event, grid()); if (at && !state.held) moveTo(...at, grid()); });
    image.on_event("tap", (event) => {
      const at = under(event, grid());
      if (!at) return;
      state.held = !state.held || at.join() !== place(grid()).join();
      moveTo(...at, grid());
    });
    $(`plot-${number}-image`).addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      const [y, x] = place(grid());
      state.held = true;
      moveTo(y + step[0], x + step[1], grid());
    });
    for (const kind of Object.keys(about.kinds)) {
      const plot = model(`${number}-${kind}`), panel = () => page.panels.find((one) => one.name === `${number}-${kind}`);
      if (plot === null) continue;
      plot.on_event("mousemove", (event) => { const one = panel(), at = one && under(event, one.found.shape); if (one) caption(one, at); });
      plot.on_event("mouseleave", () => { const one = panel(); if (one) caption(one); });
      plot.on_event("tap", (event) => {
        const one = panel(), at = one && under(event, one.found.shape);
        if (!at || one.found.shape.join() !== grid().join()) return;
        state.held = true;
        moveTo(...at, grid());
      });
    }
  });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; redraw(); } });
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", () => ink(dark.matches));
  ink(dark.matches);
}

function ink(dark) {
  for (const one of Bokeh.documents)
    for (const each of one._all_models.values())
      if (each.type === "ColorBar") each.setv({ major_label_text_color: dark ? "#e6e8eb" : "#1c1f23", major_tick_line_color: null, bar_line_color: null });
}

// For tests: the panels that are drawn, with their values.
const page = { panels: [], state, ready: false };
window.explorer = page;

async function start() {
  bytes = await decoded();
  const kind = Object.keys(about.kinds).find((one) => model(`0-${one} values`) !== null);
  Bokeh2d = model(`0-${kind} values`).data.image[0].constructor;  // Bokeh's class of arrays with two axes
  [state.y, state.x] = gridOf(0, 0).map((side) => (Math.floor(side / 2) + 0.5) / side);
  list();
  listen();
  draw();
  page.ready = true;
}

(function wait() {  // until Bokeh has built the plots
  if (model("0-image") === null) setTimeout(wait, 20);
  else start();
})();
