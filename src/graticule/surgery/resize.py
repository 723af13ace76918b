"""Change the images, patches or channels that a model is stored for; on errors the model is unchanged."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from graticule.backbones.base import Backbone
from graticule.backbones.pyramid import Pyramid
from graticule.checkpoints.obstacles import check_intact
from graticule.checkpoints.skeleton import attributes, check_untouched
from graticule.checkpoints.transfer import with_channels
from graticule.encodings.forms.absolute import FixedEncoding
from graticule.hub.config import for_channels, record_input, take_position
from graticule.layers.tokenizers import Patches, on_axes
from graticule.position.folded import Folded
from graticule.position.grid import Grid
from graticule.position.grid_module import GridModule
from graticule.position.places import Shape, by
from graticule.position.position import ENCODINGS
from graticule.position.resampling import RESAMPLERS, Resampler, build_resampler
from graticule.registry.checks import checked
from graticule.registry.fields import Side, SmallCount
from graticule.registry.registry import NameTable
from graticule.registry.specs import Spec
from graticule.surgery.attached import AttachedPosition, put_back, take_out


def check_inflation(model: Backbone, volume: Shape, patch: Shape) -> Grid:
    """Check that a model of images can become one of volumes of (depth, height, width); return their grid."""
    kind = type(model).__name__
    if 3 not in model.axes or isinstance(model, Pyramid):
        raise ValueError(
            f"`img_size` must be (height, width) with {kind}, got {volume}: its blocks have no third axis."
        )
    if isinstance(model.position, Folded):
        raise ValueError("`model` must not be folded, to take volumes; call graticule.unfold(model) first.")
    if model.created is None:
        raise ValueError("`model` must be built from names, to take volumes, got one of other parts.")
    if not isinstance(_embedding(model), Patches) or _embedding(model).frames > 1:
        raise ValueError(f"`model` must make its tokens by one layer of flat patches, to take volumes, got {kind}.")
    return Grid.of_image(volume, patch, model.grid.prefix)


@torch.no_grad()
def inflate(model: Backbone, volume: Shape, patch: Shape) -> None:
    """Let a model of images take volumes of (depth, height, width), in place; height and width stay the sides of its
    images.

    The encoding is built for three axes, with the parameters of the image; a table is repeated along the depth. Each of
    the slices of a patch has an equal part of its weights.

    `check_inflation` must accept the model; `volume` and `patch` are in pixels, their first sides in slices. Refuses an
    encoding that does not give a volume of one slice the position of the image.
    """
    check_inflation(model, volume, patch)
    embedding = _embedding(model)
    flat = embedding.proj
    weight = (flat.weight / patch[0])[:, :, None].repeat(1, 1, patch[0], 1, 1)
    sides: Any = patch
    with torch.device("meta"):
        proj = nn.Conv3d(weight.shape[1], len(weight), sides, sides, bias=flat.bias is not None).train(flat.training)
    proj.weight, proj.bias = nn.Parameter(weight, flat.weight.requires_grad), flat.bias
    embedding.proj = proj
    embedding.set_sizes(volume, patch)
    sizes: Any = {"img_size": volume, "patch_size": patch}
    vars(model).update(sizes)
    assert model.created is not None, "`check_inflation` refuses others"
    words = {name: model.created["arguments"][name] for name in ("encoding", "joining")}
    grid, old = model.grid, model.position
    model.replace_position(take_position(dict(words), defaults=model.encoding_options))
    values = old.state_dict()
    for name, table in values.items():
        prefix = table.shape[1] - grid.patches if table.ndim == 3 and len(table) == 1 else -1
        if prefix >= 0:  # a table of positions, (1, N, D)
            values[name] = torch.cat([table[:, :prefix], table[:, prefix:].repeat(1, model.grid.shape[0], 1)], 1)
    slice_grid = Grid(1, *grid.shape, prefix=grid.prefix)
    new = {name: value.shape for name, value in model.position.state_dict().items()}
    same = new == {name: value.shape for name, value in values.items()}
    if same:
        model.position.load_state_dict(values)
    if not same or not _are_same(old(grid), model.position(slice_grid)):
        raise ValueError(
            "`encoding` must give a volume of one slice the position of the image, as tables of positions and biases "
            f"of distances do, got {words['encoding']}; graticule.change_position gives the model another."
        )
    model.created = {**model.created, "arguments": {**model.created["arguments"], **sizes}}


def _are_same(image: Any, volume: Any) -> bool:
    """Return whether positions are the same, up to functions of the tokens."""
    if isinstance(image, torch.Tensor):
        return image.shape == volume.shape and torch.allclose(image, volume, rtol=1e-4, atol=1e-6)
    if isinstance(image, tuple | list):
        return len(image) == len(volume) and all(map(_are_same, image, volume))
    return type(image) is type(volume)


def _embedding(model: Backbone) -> Any:
    return getattr(model, "stem", None) or getattr(model, "patch_embed", None)


def shared_copy(model: nn.Module) -> Any:
    """Return a copy of `model` that shares its parameters and buffers."""
    memo = {id(value): value for value in [*model.parameters(), *model.buffers()]}
    return copy.deepcopy(model, memo)


def table_of(module: Any) -> Any:
    """Return the kind of table in a module or module class: one of positions or of displacements."""
    return getattr(module, "table_kind", "positions")


Model = TypeVar("Model", bound=nn.Module)
#: The functions that resize models of another library in place, from the arguments of `resize`, by its name.
LIBRARIES: NameTable[str, Callable[..., None]] = NameTable(
    "library", "graticule.external.resize", "graticule.external.resize_timm"
)


@checked
def resize(
    model: Model,
    img_size: Side | tuple[Side, Side] | tuple[Side, Side, Side] | None = None,
    resampler: str | Spec | None = None,
    *,
    patch_size: Side | tuple[Side, Side] | tuple[Side, Side, Side] | None = None,
    channels: SmallCount | None = None,
) -> Model:
    """Change the image size of `model`, in place, and return the model.

    Parameters for a grid or a window (tables, biases, matrices that mix tokens) are resampled once; computed encodings
    are computed for the new grid from then on. The forward pass at that size gives the same as before, without
    resampling. At its own size a model is unchanged, bit by bit. A folded model is folded for the new size.

    The patch embedding is resampled for another size of patches by the pseudo-inverse of the resizing of an image, so
    that a patch that was enlarged has the same token (FlexiViT, Beyer et al., 2023). For other channels it is summed to
    one, else repeated and scaled, as in timm: images of equal channels have the same tokens with one, or a multiple.

    A model of images takes volumes with `img_size=(depth, height, width)` if its blocks do (ViT and
    DeiT): a volume of one slice has the logits of the image. The weights of a patch are spread over its slices, and
    a table is repeated for each; other encodings become encodings of three axes, if they give one slice the position of
    the image. `channels=1` is for volumes.

    All other objects stay the same. Tables that are buffers or are shared remain so. A change of the model that
    resizing would undo is refused: of windows, indices, masks, frequencies, computed tables, hooks or methods. An
    optimizer keeps the old tables, so build it after.

    timm models are resized by `set_input_size`, which resamples in timm's way. A transformers model, also within a
    larger model, gets the tables that its class computes for the size, and all numbers of its configuration that follow
    from the size change, too. The tables are new parameters, for a new optimizer, and all other parameters stay the
    same objects. If its class reads tables as squares, encodings of other images have a grid of their own from then on,
    which `save_pretrained` mentions and `graticule.load` restores. Its videos have `img_size=(frames, height, width)`.

    Args:
        model: one of our backbones, a model of timm or transformers, a module that contains some of these,
            torchvision's ViT or Swin, or one of these with an attached position.
        img_size: in pixels, one side or (height, width), or (depth, height, width); unchanged by default.
        resampler: the resampler, such as 'bilinear(antialias=False)'; the model keeps it for further sizes. By
            default, each encoding's.
        patch_size: in pixels, one side or (height, width), of a patch of a ViT; unchanged by default. For volumes
            (depth, height, width); by default, the depth is 1.
        channels: number of channels of the images; unchanged by default.

    Raises:
        ValueError: if the model cannot have that size, or an argument has no effect on it. It is then unchanged.
    """
    if img_size is None and patch_size is None and channels is None and resampler is None:
        raise ValueError("`img_size`, `patch_size`, `channels` or `resampler` must be given, got none.")
    backbones = [module for module in model.modules() if isinstance(module, Backbone)]
    inner = getattr(model, "backbone", None)
    if not backbones and type(model).__module__.startswith("graticule.") and isinstance(inner, nn.Module):
        resize(inner, img_size, resampler, patch_size=patch_size, channels=channels)  # a debiased model of others
        return model
    check_intact(model, "replicated" if backbones else "wrapped", values=False)
    attached = [module for module in model.modules() if isinstance(module, AttachedPosition)]
    library = type(model).__module__.partition(".")[0]
    if isinstance(img_size, tuple) and len(img_size) == 3 and len(backbones) != 1 and library != "transformers":
        raise ValueError(
            f"`img_size` must be (height, width) unless `model` is one of our backbones, got {img_size}; "
            "graticule.convert makes one of a model of timm or transformers."
        )
    axes = len(backbones[0].img_size) if backbones else 2
    size, patch = (None if value is None else on_axes(value, axes) for value in (img_size, patch_size))
    if size is not None and len(size) < axes:
        raise ValueError(f"`img_size` must be (depth, height, width), as the model has volumes, got {by(size)}.")
    with torch.inference_mode(False), restore_on_error(model), _naming_parts(model):
        # tensors of inference could never be trained
        if backbones:
            if resampler is not None:
                _set_resampler([*backbones, *attached], resampler)
            with carried(model):
                for backbone in backbones:
                    _resize_backbone(backbone, size or backbone.img_size, patch)
                    if channels is not None:
                        set_channels(backbone, channels)
                        record_input(backbone, channels, backbone.img_size)
            if channels is not None:
                for holder in map(vars, model.modules()):
                    for name in {"image_mean", "image_std"} & holder.keys():  # of detectors, which normalize images
                        holder[name] = list(for_channels(holder[name], channels))
            return model
        if attached and patch is not None:
            raise ValueError(f"`patch_size` must be left out with an attached position, got {by(patch)}.")
        if attached and resampler is not None:
            _set_resampler(attached, resampler)
            resampler = None
        if (img_size, patch_size, channels, resampler) != (None,) * 4:
            modules = [type(module).__module__ for module in model.modules()]
            if library not in LIBRARIES:  # a module around a model of one, or one with the interface of timm
                library = "transformers" if any(name.startswith("transformers.") for name in modules) else "timm"
            resize_library = LIBRARIES[library]
            with _as_attached_to(model, attached, size):
                resize_library(model, img_size=img_size, resampler=resampler, patch_size=patch_size, channels=channels)
    return model


@contextmanager
def _as_attached_to(model: nn.Module, attached: Sequence[AttachedPosition], size: Any) -> Iterator[None]:
    """Restore the tables that attached positions replaced, to be resized too, and then set the grids of both."""
    for position in attached:
        for removed in position.removed:
            put_back(model, removed)
    grids = [position.grid if size is None else position.grid_at(size) for position in attached]
    with carried(model):
        yield
        for position, grid in zip(attached, grids, strict=True):
            if grid != position.grid:
                _check_computed(position)
                position.set_grid(grid)
                with torch.no_grad():
                    position.position(grid)
    for position in attached:
        position.removed = [take_out(model, removed.name) for removed in position.removed]


@contextmanager
def _naming_parts(model: nn.Module) -> Iterator[None]:
    """Name the part of a model that lacks an attribute which a resize reads, such as a layer within a Sequential."""
    try:
        yield
    except AttributeError as error:
        place = {id(part): name for name, part in model.named_modules()}.get(id(error.obj))
        if not place:
            raise
        raise ValueError(
            f"`{place}` must be of the class that {type(model).__name__} is built with, to be resized, got "
            f"{type(error.obj).__name__}, which has no `{error.name}`; resize the model first, and replace it after."
        ) from error


def _check_computed(owner: Any) -> None:
    """Check that tables and buffers are those that the encodings compute, which are computed again for another grid."""
    check_intact(owner.position, "pruned", "parametrized", name="model.position", values=False)
    for name, part in _named_parts(owner):
        if not isinstance(part, GridModule):
            continue
        values = {key: value.clone() for key, value in part.named_buffers(recurse=False)}
        part.init_non_persistent_buffers()
        expected = dict(part.named_buffers(recurse=False))
        fixed: Any = part if isinstance(part, FixedEncoding) and not part.pos_embed.is_meta else None
        if fixed is not None and fixed.factor_of(fixed.pos_embed[0].double(), fixed.grid) != fixed.factor:
            values["pos_embed"], expected["pos_embed"] = fixed.pos_embed.detach(), fixed.at(fixed.grid)[None]
        for key, value in values.items():
            check_untouched(owner, f"{name}.{key}", value, expected[key])


def _named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield all modules with their names, and after a folded position its original."""
    for name, part in model.named_modules():
        yield name, part
        if isinstance(part, Folded):
            yield name, part.original


@contextmanager
def same_layers(model: nn.Module) -> Iterator[None]:
    """Keep the convolutions that the block replaces by new ones of another size: they get the weights of these."""
    layers: dict[str, Any] = dict(model.named_modules())
    yield
    for name, new in list(model.named_modules()):
        old = layers.get(name)
        if isinstance(new, nn.Conv2d) and isinstance(old, nn.Conv2d) and old is not new:
            check_intact(old, "pruned", "parametrized", name=f"model.{name}", values=False)
            old.weight, old.kernel_size, old.stride = new.weight, new.kernel_size, new.stride
            model.set_submodule(name, old)


def set_channels(model: Any, channels: int) -> None:
    """Adapt the first convolution of a backbone of this library or of timm, in place."""
    name = getattr(model, "first_conv", None) or (getattr(model, "pretrained_cfg", None) or {}).get("first_conv")
    layer: Any = dict(model.named_modules()).get(name)
    if not isinstance(layer, nn.Conv2d | nn.Conv3d) or layer.groups != 1:
        raise ValueError(f"`channels` must be left out with {type(model).__name__}, whose first layer is another.")
    if layer.in_channels == channels:
        return
    check_intact(layer, "pruned", "parametrized", name=f"model.{name}", values=False)
    layer.weight = nn.Parameter(with_channels(layer.weight.detach(), channels), layer.weight.requires_grad)
    layer.in_channels = channels
    if hasattr(model, "in_chans"):
        model.in_chans = channels


def _resize_backbone(backbone: Backbone, size: Any, patch: Shape | None) -> None:
    """Resize a backbone of this library; one of images for (depth, height, width) takes volumes from then on."""
    volume: Shape | None = None
    if len(size) > len(backbone.img_size):
        deep = patch or backbone.patch_size
        deep = deep if len(deep) == 3 else (1, *deep)
        check_inflation(backbone, size, deep)
        volume, size, patch = size, size[1:], patch and patch[-2:]
    sizes: dict[str, Any] = {}
    if patch is not None and patch != backbone.patch_size:
        if "patch_size" not in inspect.signature(backbone.set_input_size).parameters:
            raise ValueError(f"`patch_size` must be left out with {type(backbone).__name__}, got {by(patch)}.")
        Grid.of_image(size, patch)  # refuses other sizes with its own message
        sizes["patch_size"] = patch
    else:
        backbone.grid_at(size)  # refuses other sizes
    if size != backbone.img_size or sizes:
        _check_computed(backbone)
        with same_layers(backbone):
            backbone.set_input_size(size, **sizes)
        if not isinstance(backbone.position, Folded):  # a folded position was computed already
            with torch.no_grad():
                backbone.position(backbone.grid)
    if volume is not None:
        inflate(backbone, volume, deep)


def _set_resampler(holders: Sequence[Backbone | AttachedPosition], resampler: str | Spec) -> None:
    """Set the resampler of all suitable tables to `resampler`, also for publishing the model."""
    spec = RESAMPLERS.specs(resampler)[0]
    parts: Iterable[Any] = (part for holder in holders for part in holder.position.modules())
    modules = [part for part in parts if isinstance(getattr(part, "resampler", None), Resampler)]
    suitable = [part for part in modules if table_of(part) in RESAMPLERS[spec.name].takes]
    for part in suitable:
        part.resampler = build_resampler(spec, table_of(part))
    if not suitable:
        has = sorted({f"tables of {table_of(part)}" for part in modules})
        raise ValueError(
            f"`resampler` must be one that resamples something of the model, which has "
            f"{' and '.join(has) or 'nothing that is resampled'}, got {spec}."
        )
    for holder in holders:
        created = dict(holder.created or {})
        if isinstance(holder, Backbone) and created:
            created["arguments"] = _with_resampler(created["arguments"], spec)
            holder.created = created
        elif isinstance(holder, AttachedPosition):
            holder.created = _with_resampler(created, spec)


def _with_resampler(words: Mapping[str, Any], resampler: Spec) -> dict[str, Any]:
    """Return `words` with `resampler` as an option of each encoding that it suits."""
    takes = set(RESAMPLERS[resampler.name].takes)
    specs = []
    for spec in ENCODINGS.specs(words["encoding"]):
        tables = set(table_of(ENCODINGS[spec.name]).split(", "))
        resampled = "resampler" in ENCODINGS.options(spec.name) and tables & takes
        if resampled and tables - takes:
            raise ValueError(
                f"`resampler` must be one for tables of {' and '.join(sorted(tables))}, as {spec.name} has both, got "
                f"{resampler}, which is for {' and '.join(takes)}."
            )
        specs.append(Spec(spec.name, {**spec.options, "resampler": str(resampler)}) if resampled else spec)
    return {**words, "encoding": " + ".join(map(str, specs))}


class _Place(NamedTuple):
    """Where a module has a tensor: its parameters, buffers or attributes; buffers may be left out of state dicts."""

    module: str
    part: Any
    holder: str
    key: str
    persistent: bool

    @property
    def value(self) -> Any:
        return attributes(self.part).get(self.key)

    def set(self, value: Tensor) -> None:
        """Set the tensor in the dictionary that had it before."""
        values = vars(self.part)[self.holder] if self.holder else vars(self.part)
        if self.key not in values:
            delattr(self.part, self.key)
            self.part.register_buffer(self.key, None, self.persistent)
        values[self.key] = value


@contextmanager
def carried(model: nn.Module) -> Iterator[None]:
    """Let tensors that the block replaces have the places, the kind and the attributes of the old ones.

    A parameter at several places stays one, and a buffer a buffer. What cannot be carried over is refused.
    """
    places: dict[Tensor, list[_Place]] = {}  # tensors are hashed by identity
    for name, part in _named_parts(model):
        for key, value in attributes(part).items():
            if isinstance(value, Tensor):
                holder = next((holder for holder in ("_parameters", "_buffers") if key in vars(part)[holder]), "")
                is_saved = key not in part._non_persistent_buffers_set
                places.setdefault(value, []).append(_Place(name, part, holder, key, is_saved))
    yield
    known, parts = {id(part) for _, part in _named_parts(model)}, dict(model.named_modules())
    for old, same in places.items():
        same = [
            place if id(place.part) in known else place._replace(part=parts.get(place.module, place.part))
            for place in same
        ]
        new = {f"{place.module}.{place.key}".lstrip("."): place.value for place in same if place.value is not old}
        name, value = next(iter(new.items()), ("", None))
        if new and (getattr(old, "_backward_hooks", None) or getattr(old, "_post_accumulate_grad_hooks", None)):
            raise ValueError(f"`{name}` must have no hooks, which a new tensor would lose; remove them first.")
        if not isinstance(value, Tensor):
            continue
        for other, another in new.items():
            is_same = another is value or (
                isinstance(another, Tensor) and (another.is_meta or torch.equal(another, value))
            )
            if not is_same:
                raise ValueError(f"`{other}` must not be the tensor {name}, too: their values of another size differ.")
        if type(old) is Tensor and type(value) is not Tensor:
            value = value.detach()
        elif type(old) is not type(value):
            raise ValueError(f"`{name}` must be a {type(value).__name__}, got {type(old).__name__}.")
        vars(value).update(vars(old))
        for place in same:
            place.set(value)


@contextmanager
def restore_on_error(model: nn.Module, *others: object) -> Iterator[None]:
    """Restore the attributes, parameters and buffers of all modules, and the attributes of `others`, on errors."""
    restore = restorer(model, *others)
    try:
        yield
    except BaseException:
        restore()
        raise


def restorer(model: nn.Module, *others: object) -> Callable[[], None]:
    """Return a function that restores the attributes, parameters and buffers of modules, and attributes of `others`.

    Values of parameters are not restored: resizing a model creates new ones.
    """
    buffers = [(value, value.clone()) for value in model.buffers()]
    modules = dict.fromkeys(part for _, part in _named_parts(model))
    contents: list[tuple[Any, Any]] = [(vars(module), dict(vars(module))) for module in [*modules, *others]]
    values = [value for _, attributes in contents for value in attributes.values()]
    contents += [(value, value.copy()) for value in values if isinstance(value, dict | set | list)]

    def restore() -> None:
        for container, content in contents:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for buffer, content in buffers:  # timm copies the bands of rotations into their buffer
            buffer.copy_(content)

    return restore
