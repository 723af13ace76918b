"""The page of an audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from graticule.analysis.attention import AttentionSummary
from graticule.analysis.audit import Audit
from graticule.analysis.effect import Effect
from graticule.analysis.position_maps import StageMaps
from graticule.analysis.share import PositionShare
from graticule.lab.figures.layers import attention_plot, effect_plot, probe_plot, share_plot, translation_plot
from graticule.lab.figures.position_sheets import position_sheets
from graticule.lab.figures.style import spread
from graticule.lab.pages.report import Report
from graticule.position.places import axis_names, by

#: Maximum number of layers in a sheet of biases.
_SHEET_LAYERS = 6
#: Kind of sheet -> what it shows.
_SHOWN = {
    "correlations": "Position correlations: the cosine of two positions as each layer sees them (LaPE, Eq. 12)",
    "rotary": "Similarity of two positions under the rotation of queries and keys alone, mean over heads",
    "bias": "The bias that each head adds to its attention logits",
}


def audit_page(audit: Audit, title: str, lines: Sequence[tuple[str, str]] = ()) -> Report:
    """Build the page of an audit.

    Args:
        audit: its results.
        title: of the page, such as the name of the model.
        lines: settings of the audit, as rows of the first table.
    """
    kind = "videos" if len(audit.img_size) > 2 else "images"
    report = Report(title, f"Position audit: {audit.images} {kind} of {by(audit.img_size)} pixels")
    columns, *rows = audit.summary()
    report.table(columns, rows)
    if lines:
        report.table(("", ""), lines, "Settings of the audit")
    _share(report, audit.share)
    _cost(report, audit)
    _probe(report, audit)
    _effects(report, audit)
    _sizes(report, audit)
    if audit.translation is not None:
        report.heading("Translation")
        report.text(
            "The image is shifted by whole patches; what leaves it on one side enters on the other. 0: features are "
            "shifted with it. 1: they change as much as they differ between tokens and images."
        )
        figure = translation_plot({title: audit.translation})
        report.figure(figure, "Difference after a shift, by layer", "Lines of the difference after a shift by layer")
        columns, *rows = audit.translation.summary()
        report.table(columns, rows, audit.translation.heading)
    if audit.attention is not None:
        _attention(report, audit.attention)
    if audit.maps:
        report.heading("Position maps")
        shorter, notes = zip(*map(_select_layers, audit.maps), strict=True)
        for sheet in position_sheets(shorter, title):
            about = _SHOWN[sheet.kind]
            note = notes[sheet.stage].get(sheet.kind, "")
            report.figure(sheet.figure, f"{about}{sheet.of}{note}", f"{about.partition(':')[0]}{sheet.of}")
    if audit.unavailable:
        report.heading("Not measured")
        report.table(("analysis", "reason"), sorted(audit.unavailable.items()))
    return report


def _share(report: Report, share: PositionShare) -> None:
    report.heading("Position in the features")
    report.text(
        "The share of the variance of the tokens that is explained by the mean of each position over images. It is "
        "unbiased: 0 on average for a model without position, however few the images are. Images whose content "
        "depends on the place, such as streets below skies, have a share without position in the model. Linear: what "
        "is linear in the coordinates; additive: a function of the row plus one of the column, or of each axis. SSDC: "
        "correlation of the similarity of two patches with minus their distance."
    )
    caption = "Share of the variance that position explains; bars are intervals of 95 %, by the jackknife over images"
    report.figure(share_plot(share), caption, "Lines of the share of position by layer")
    for at_size in (share, *share.others.values()):
        columns, *rows = at_size.summary()
        norms = "outliers: percent of tokens with a norm above 3 times the median"
        report.table(columns, rows, f"Shares in percent at {by(at_size.img_size)}, with intervals of 95 %; {norms}")


def _cost(report: Report, audit: Audit) -> None:
    report.heading("Cost")
    total = sum(audit.position.values())
    rows = [(kind, f"{count:,}", f"{100 * count / audit.parameters:.2f} %") for kind, count in audit.position.items()]
    rows.append(("all position information", f"{total:,}", f"{100 * total / audit.parameters:.2f} %"))
    rows.append(("the model", f"{audit.parameters:,}", "100 %"))
    report.table(("part", "parameters", "share"), rows, "Parameters")
    if audit.unknown:
        report.note(f"Not counted, and not changed below, as their structure is not known: {', '.join(audit.unknown)}.")
    if audit.times:
        shares: list[tuple[str, ...]] = []
        for turns in audit.times:
            for name, less, more in (
                ("computing position information", "folded", "computed"),
                ("using it", "without", "folded"),
                ("both", "without", "computed"),
            ):
                if less in turns.seconds and more in turns.seconds:
                    median, low, high = turns.share(more, less)
                    count = str(len(turns.seconds[more]))
                    span = f"{100 * low:.1f} to {100 * high:.1f} %"
                    shares.append((name, str(turns.batch), f"{100 * median:.1f} %", span, count))
        report.table(
            ("share of a forward pass", "images", "median", "quartiles", "rounds"),
            shares,
            "Time on this machine: forward passes with and without position information, interleaved. A quartile "
            "below 0 is the noise of the machine.",
        )


def _probe(report: Report, audit: Audit) -> None:
    report.heading("Linear probe of position")
    report.text(
        "A linear map of the features of a patch predicts its coordinates. It is fitted by ridge regression, and "
        "scored on held-out images. R² is 1 if position can be read exactly, and 0 if it cannot be read at all; the "
        "content alone tells something of position, such as sky above and ground below. In the control, the labels "
        "are shuffled over the patches of each image."
    )
    figure = probe_plot(audit.probe_content, audit.probes)
    report.figure(figure, "R² by layer; bars are standard errors over folds", "Lines of R² of the coordinates by layer")
    layers = [("patches alone", audit.probe_content)] if audit.probe_content is not None else []
    rows = []
    for name, probe in [*layers, *((str(layer), probe) for layer, probe in enumerate(audit.probes))]:
        assert probe is not None
        cells = map(_with_error, probe.mean, probe.error)
        rows.append((name, *cells, *map(_with_error, probe.control_mean, probe.control_error)))
    names = axis_names(len(audit.img_size))
    columns = ("layer", *names, *(f"control: {axis}" for axis in names))
    report.table(columns, rows, "R² ± standard error over folds")
    probe = audit.probes[-1]
    if probe.examples < 10 * probe.channels:
        report.note(
            f"{probe.examples:,} patches are few for {probe.channels} channels: with more images R² would be larger."
        )


def _effects(report: Report, audit: Audit) -> None:
    report.heading("Effects of changed position")
    report.text(
        "The same images are passed through the model with its position information changed. Zeroed: no layer gets "
        "any. Shuffled: each patch gets the position of another one, the same in all layers. Of a larger size: each "
        "patch gets the position of the nearest patch of an image of twice the sides; functions of the tokens, such as "
        "a PEG, are not changed. Removed: after each layer, the directions that the probe reads are projected out of "
        "the features; the control removes as many directions, for shuffled labels."
    )
    if audit.effects:
        figure = effect_plot(audit.effects)
        caption = "Change of the features by layer; bars are standard errors over images"
        report.figure(figure, caption, "Lines of the change of the features by layer")
    columns, rows = _effect_table(audit.effects)
    caption = "Last layer"
    if audit.accuracy is not None:
        of = "5 leave-one-out neighbors of the unchanged model" if audit.neighbors else "the unchanged model"
        caption += f"; accuracy of {of}: {audit.accuracy[0]:.1f} ± {audit.accuracy[1]:.1f} %"
    report.table(columns, rows, caption)


def _sizes(report: Report, audit: Audit) -> None:
    if not audit.sizes:
        return
    report.heading("Other sizes")
    report.text(
        f"Features of the same images at another size, resampled to the grid at {by(audit.img_size)}, compared with "
        "those at that size."
    )
    if audit.causes:
        report.text(
            "Two passes before it change one thing each: 'tokens' repeats patches and positions to fill the grid, "
            "'content' has the images of the size with those positions. Only the size itself has its own positions."
        )
    effects = [*audit.causes, *audit.sizes.values()]
    report.figure(effect_plot(effects), "Change of the features by layer", "Lines of the change of the features")
    columns, rows = _effect_table(effects)
    report.table(("size", *columns[1:]), rows, "Last layer")


def _effect_table(effects: Sequence[Effect]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return columns and rows of the effects on the last layer and on the predicted classes."""
    columns = ["change", "change of features", "cosine"]
    if any(effect.same is not None for effect in effects):
        columns.append("top-1 as before")
    if any(effect.right is not None for effect in effects):
        columns += ["accuracy (points)", "p (McNemar)"]
    rows = []
    for effect in effects:
        row = [
            effect.name,
            _with_error(effect.mean_change[-1], effect.change_error[-1]),
            f"{effect.cosine[-1].mean():.3f}",
        ]
        if effect.same is not None:
            row.append(f"{100 * effect.same.mean():.1f} %")
        if effect.accuracy is not None and effect.p_value is not None:
            row += [_format_signed(effect.accuracy), f"{effect.p_value:.2g}"]
        rows.append(tuple(row + ["-"] * (len(columns) - len(row))))
    return tuple(columns), rows


def _attention(report: Report, summary: AttentionSummary) -> None:
    report.heading("Attention")
    report.figure(
        attention_plot(summary),
        "A dot per head, the line their mean; dotted: a head that attends to all keys alike. Distances are those "
        "between patches of a layer's grid, or of its windows.",
        "Three panels with a dot per head and layer: distance, entropy, share on prefix tokens",
    )
    rows = []
    for index, layer in enumerate(summary.layers):
        values = (summary.distance[index], summary.entropy[index], summary.prefix[index])
        spans = [f"{np.nanmin(heads):.2f} to {np.nanmax(heads):.2f}" for heads in values]
        rows.append((str(layer), *spans, f"{summary.uniform[index]:.2f}"))
    columns = ("layer", "distance (patches)", "entropy (nats)", "share on prefix tokens", "distance if uniform")
    report.table(columns, rows, "Range over the heads, mean over images")


def _with_error(value: float, error: float) -> str:
    return "-" if np.isnan(value) else f"{value:.3f} ± {error:.3f}"


def _format_signed(pair: tuple[float, float]) -> str:
    return f"{pair[0]:+.1f} ± {pair[1]:.1f}"


def _select_layers(stage: StageMaps) -> tuple[StageMaps, dict[str, str]]:
    """Return maps with one rotation, if all layers that rotate have the same, and with the biases of a few layers.

    The second result are notes about that, by the kind of sheet.
    """
    rotary, biases, notes = stage.rotary, stage.biases, {}
    if rotary is not None:
        rotating = [index for index, source in enumerate(rotary.sources) if source is not None]
        first = rotary.similarity[rotating[0]]
        if len(rotating) > 1 and all(np.array_equal(rotary.similarity[index], first) for index in rotating):
            source = rotary.sources[rotating[0]]
            notes["rotary"] = "; the same in all layers that rotate"
            rotary = dataclasses.replace(rotary, similarity=first[None], sources=(source,))
    if biases is not None and len(biases.layers) > _SHEET_LAYERS:
        notes["bias"] = f"; {_SHEET_LAYERS} of {len(biases.layers)} layers"
        chosen = spread(len(biases.layers), _SHEET_LAYERS)
        layers = tuple(biases.layers[index] for index in chosen)
        biases = dataclasses.replace(biases, layers=layers, bias=biases.bias[chosen])
    return dataclasses.replace(stage, rotary=rotary, biases=biases), notes
