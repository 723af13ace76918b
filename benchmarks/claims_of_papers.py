"""Claims of the five papers, each with its test."""

from __future__ import annotations

from dataclasses import dataclass

from graticule.lab.studies.study import TRAINED

LAPE, FIRST = "LaPE (2023)", "LaPE, first version (2022)"
CPVT, POSMLP, NOTES = "CPVT (2023)", "PosMLP (2022)", "Introduction to Transformers (2023)"
#: A weighted score: its weight, the choice, and the measurement ("trained", "zoom 40", ...).
Term = tuple[float, str, str]


@dataclass(frozen=True)
class Claim:
    """A claim of a paper and our test of it.

    paper, where, text: paper, place in the paper, and the claim in words.
    command: command that runs the test.
    data: study whose table has the scores, or 'extrapolation' or 'gym'; empty if no scores test the claim.
    contrast: weighted scores of a seed; the claim is that their mean is above zero.
    shrinks: weighted scores of a seed; if given, the claim is that their sum is closer to zero than that of `contrast`,
        whatever the signs of both.
    variant: variant of the study.
    equal: whether the claim is that the mean is zero.
    test: description of the measurement; if empty, it is made from the contrast. For the verdict 'exact', the test of
        the code that proves the claim, FILE::FUNCTION.
    verdict: verdict on a claim that no scores test.
    """

    paper: str
    where: str
    text: str
    command: str = ""
    data: str = ""
    contrast: tuple[Term, ...] = ()
    shrinks: tuple[Term, ...] = ()
    variant: str = ""
    equal: bool = False
    test: str = ""
    verdict: str = ""

    @property
    def tested(self) -> str:
        """Describe the measurement in words."""
        said = self.test or _sum_of(self.contrast)
        if self.shrinks and not self.test:
            said = f"abs({said}) - abs({_sum_of(self.shrinks)})"
        return f"{said}, {self.variant}" if self.variant else said


def _sum_of(terms: tuple[Term, ...]) -> str:
    parts = [f"{'-' if weight < 0 else '+'} {choice} ({at})" for weight, choice, at in terms]
    return " ".join(parts).removeprefix("+ ")


def difference(choice: str, reference: str, at: str = TRAINED) -> tuple[Term, ...]:
    """Return the contrast between two choices."""
    return ((1.0, choice, at), (-1.0, reference, at))


def gain(choice: str, reference: str, at: str) -> tuple[Term, ...]:
    """Return the contrast between the changes of two choices from the training size to `at`."""
    return ((1.0, choice, at), (-1.0, choice, TRAINED), (-1.0, reference, at), (1.0, reference, TRAINED))


def change(choice: str, at: str) -> tuple[Term, ...]:
    """Return the contrast between a choice at a size and at the training size."""
    return ((1.0, choice, at), (-1.0, choice, TRAINED))


def change_of(choice: str, at: str, minus: str) -> tuple[Term, ...]:
    """Return the contrast between two measures of a choice."""
    return ((1.0, choice, at), (-1.0, choice, minus))


def of_study(name: str) -> dict[str, str]:
    """Return the fields of a claim that a study tests."""
    return {"data": name, "command": f"graticule study evidence/studies/{name}.py"}


#: Every choice at 25 tokens and, with the same weights, at 100: `canvas 40` and `zoom 40`.
EXTRAPOLATION = {"data": "extrapolation", "command": "python benchmarks/extrapolation.py"}
#: Every choice on 6 x 6 cells and, with the same weights, on 9 x 9: `9 cells`; the variant is the task.
GYM = {"data": "gym", "command": "graticule gym --sizes 9"}
JOININGS = {**of_study("lape_joinings"), "variant": "10 epochs"}
DECOMPOSITIONS, UNITS = of_study("lape_decompositions"), of_study("posmlp_units")
BEFORE = "measured, but not kept seed by seed: docs/results.md"
NEVER = "cannot be tested here"
CLAIMS = [
    Claim(
        LAPE,
        "Tables 1, 7",
        "LaPE beats the default joining of a learnable table",
        contrast=difference("learnable, LaPE", "learnable"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Table 7",
        "LaPE beats the default joining of 1-D sinusoids",
        contrast=difference("sinusoidal 1-D, LaPE", "sinusoidal 1-D"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Table 7",
        "LaPE beats the default joining of 2-D sinusoids",
        contrast=difference("sinusoidal 2-D, LaPE", "sinusoidal 2-D"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "our control",
        "LaPE beats a table with the initial amplitude of a norm",
        contrast=difference("learnable, LaPE", "learnable, std 1"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "our control",
        "LaPE of a table with the initial amplitude of a norm beats the same table without LaPE",
        contrast=difference("learnable, std 1, LaPE", "learnable, std 1"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Tables 1, 7",
        "LaPE beats the default joining of a learnable table, tested again with eight other seeds",
        contrast=difference("LaPE", "std 0.02"),
        **of_study("lape_zoom"),
    ),
    Claim(
        LAPE,
        "our control",
        "LaPE beats a table with the initial amplitude of a norm, tested again with eight other seeds",
        contrast=difference("LaPE", "std 1"),
        **of_study("lape_zoom"),
    ),
    Claim(
        LAPE,
        "our control",
        "LaPE beats a table with the initial amplitude of a norm by more on zoomed images than at the training size",
        contrast=gain("LaPE", "std 1", "zoom 40"),
        **of_study("lape_zoom"),
    ),
    *(
        Claim(
            LAPE,
            where,
            text.format(epochs=epochs),
            variant=f"{epochs} epochs",
            contrast=difference("learnable, LaPE", other),
            **of_study("lape_epochs"),
        )
        for epochs in (40, 100)
        for where, text, other in (
            ("Tables 1, 7", "after {epochs} epochs LaPE beats the default joining of a learnable table", "learnable"),
            (
                "our control",
                "after {epochs} epochs LaPE beats a table with the initial amplitude of a norm",
                "learnable, std 1",
            ),
        )
    ),
    Claim(
        LAPE,
        "Table 7",
        "LaPE beats a table shared by all layers",
        contrast=difference("learnable, LaPE", "learnable, shared"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Table 7",
        "LaPE beats a separate table in every layer",
        contrast=difference("learnable, LaPE", "learnable, unshared"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Table 7, section 3.3",
        "passing the embedding from layer to layer beats sharing it",
        contrast=difference("learnable, LaPE", "learnable, LaPE sharing"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Tables 1, 7",
        "LaPE of an absolute embedding beats a relative bias",
        contrast=difference("learnable, LaPE", "relative bias"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Table 7",
        "LaPE reduces the gap between learnable and 1-D sinusoidal embeddings, whichever is better",
        contrast=difference("learnable", "sinusoidal 1-D"),
        shrinks=difference("learnable, LaPE", "sinusoidal 1-D, LaPE"),
        **JOININGS,
    ),
    Claim(
        LAPE,
        "Table 8",
        "the independent normalization helps: Norm(w) beats the default",
        contrast=difference("Norm(w)", "default"),
        **DECOMPOSITIONS,
    ),
    Claim(
        LAPE,
        "Table 8",
        "an unnormalized table in every layer is worse than the default",
        contrast=difference("default", "w"),
        **DECOMPOSITIONS,
    ),
    Claim(
        LAPE,
        "Table 8",
        "the whole LayerNorm is better than the normalization alone",
        contrast=difference("LN(w)", "Norm(w)"),
        **DECOMPOSITIONS,
    ),
    Claim(
        LAPE,
        "our control",
        "the whole LayerNorm is better than an unnormalized table with the initial amplitude of a norm",
        contrast=difference("LN(w)", "w, std 1"),
        **DECOMPOSITIONS,
    ),
    Claim(
        LAPE,
        "our test of Eq. 6, 7",
        "with the default joining, the coefficient of position is smaller in deeper layers",
        contrast=((1.0, "std 0.02", "lambda_position, layer 1"), (-1.0, "std 0.02", "lambda_position, layer 4")),
        test="lambda_2 in layer 1 - lambda_2 in layer 4, a learnable table",
        **of_study("lape_coefficients"),
    ),
    Claim(
        LAPE,
        "Table 2",
        "LaPE helps ViT-Lite on CIFAR-10",
        variant="ViT-Lite-2/4",
        contrast=difference("LaPE", "default"),
        **of_study("cifar10"),
    ),
    Claim(
        LAPE,
        "Table 2",
        "LaPE helps CVT on CIFAR-10",
        variant="CVT-2/4",
        contrast=difference("LaPE", "default"),
        **of_study("cifar10"),
    ),
    Claim(
        LAPE,
        "Table 2",
        "LaPE helps CCT on CIFAR-10",
        variant="CCT-2/3x2",
        contrast=difference("LaPE", "default"),
        **of_study("cifar10"),
    ),
    Claim(
        LAPE,
        "Table 2",
        "LaPE helps ViT-Lite on a tenth of CIFAR-10",
        variant="5,000 images",
        contrast=difference("LaPE", "default"),
        **of_study("cifar10"),
    ),
    Claim(
        LAPE,
        "our control",
        "LaPE beats a table with the initial amplitude of a norm on a tenth of CIFAR-10",
        variant="5,000 images",
        contrast=difference("LaPE", "default, std 1"),
        **of_study("cifar10"),
    ),
    Claim(
        LAPE,
        "Table 1, on other data",
        "LaPE helps a small ViT on Fashion-MNIST",
        variant="3,000 images",
        contrast=difference("LaPE", "default"),
        **of_study("fashion_mnist"),
    ),
    Claim(
        LAPE,
        "our control",
        "LaPE beats a table with the initial amplitude of a norm on Fashion-MNIST",
        variant="3,000 images",
        contrast=difference("LaPE", "default, std 1"),
        **of_study("fashion_mnist"),
    ),
    Claim(
        LAPE,
        "our control",
        "a learnable table is better with a larger initial amplitude",
        contrast=difference("std 1", "std 0.02"),
        **of_study("amplitude"),
    ),
    *(
        Claim(
            LAPE,
            "section 3.3",
            text,
            variant="24 layers",
            contrast=difference("LaPE", other),
            **of_study("depth"),
        )
        for text, other in (
            ("in a deep model LaPE beats sharing", "LaPE sharing"),
            ("in a deep model LaPE beats a table with the initial amplitude of a norm", "default, std 1"),
        )
    ),
    *(
        Claim(
            LAPE,
            "Figure 3" if family == "T2T-ViT" else "Figure 3, in another family",
            f"LaPE makes the correlations of 1-D sinusoids more two-dimensional in {family}, here in the last layer",
            variant=family,
            contrast=difference("sinusoidal 1-D, LaPE", "sinusoidal 1-D", "two-dimensionality, last layer"),
            **of_study("correlations"),
        )
        for family in ("DeiT", "T2T-ViT", "Swin", "CeiT")
    ),
    *(
        Claim(
            LAPE,
            "Figure 4" if family == "DeiT" else "Figure 4, in another family",
            f"learnable embeddings with LaPE go from local to global in {family}",
            variant=family,
            contrast=change_of("learnable, LaPE", "locality, last layer", "locality, first layer"),
            **of_study("correlations"),
        )
        for family in ("DeiT", "T2T-ViT", "Swin", "CeiT")
    ),
    Claim(
        LAPE,
        "Tables 3, 4",
        "LaPE helps detection on COCO and segmentation on ADE20K",
        test="needs COCO, ADE20K and pretraining on ImageNet",
        verdict=NEVER,
    ),
    *(
        Claim(
            LAPE,
            "Table 4, on other data",
            f"LaPE helps a small {model} in segmentation on CamVid (mIoU)",
            variant=model,
            contrast=difference("learnable, LaPE", "learnable"),
            **of_study("camvid"),
        )
        for model in ("ViT", "PVT")
    ),
    Claim(
        LAPE,
        "Table 5",
        "LaPE adds 2 D parameters per layer",
        test="tests/backbones/test_parameter_counts.py::test_lape_adds_two_d_for_each_joined_layer",
        verdict="exact",
    ),
    Claim(
        LAPE,
        "Table 6",
        "LaPE costs less than 1 % of a training step",
        "python benchmarks/overhead.py",
        test="DeiT-Ti on a CPU",
        verdict=BEFORE,
    ),
    Claim(
        LAPE,
        "conclusion",
        "LaPE may help transformers in other modalities: text",
        "graticule compare pydoc_nano --choices encoding=learnable encoding=learnable,joining=lape --seeds 1 2 3 4 5",
        test="bits per byte of a small language model",
        verdict=BEFORE,
    ),
    Claim(
        FIRST,
        "Table 6",
        "adding the position embedding in more layers than the first helps",
        contrast=difference("first 4", "first 1"),
        **of_study("lape_eta"),
    ),
    Claim(
        FIRST,
        "section 3.4",
        "LaPE can be precomputed for inference",
        test="tests/surgery/test_fold.py::test_a_folded_model_computes_the_same_at_every_size_and_unfolds_exactly",
        verdict="exact",
    ),
    Claim(
        CPVT,
        "Table 1",
        "accuracy is lower without position encodings",
        contrast=difference("learnable", "none"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Tables 1, 7",
        "sinusoids are as good as a learnable table",
        contrast=difference("sinusoidal_2d", "learnable"),
        equal=True,
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Tables 1, 7",
        "relative encodings (Shaw) are inferior to absolute ones",
        contrast=difference("learnable", "shaw"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Tables 2, 7",
        "one PEG beats a learnable table at the training size",
        contrast=difference("peg", "learnable"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Table 2, without its crops in training",
        "PEG gains on zoomed images",
        contrast=change("peg", "zoom 40"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Table 2, without its crops in training",
        "PEG gains on a larger canvas",
        contrast=change("peg", "canvas 40"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Table 2, without its crops in training",
        "PEG gains more, or loses less, than a learnable table: zoomed images",
        contrast=gain("peg", "learnable", "zoom 40"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Table 2, without its crops in training",
        "PEG gains more, or loses less, than a learnable table: larger canvas",
        contrast=gain("peg", "learnable", "canvas 40"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "our control",
        "PEG gains more, or loses less, than a learnable table with LaPE: larger canvas",
        contrast=gain("peg", "learnable, lape", "canvas 40"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Table 2, without its crops in training",
        "sinusoids lose more than a learnable table on zoomed images",
        contrast=gain("learnable", "sinusoidal_2d", "zoom 40"),
        **EXTRAPOLATION,
    ),
    Claim(
        CPVT,
        "Table 2",
        "after training with crops of many scales PEG gains on a larger canvas",
        contrast=change("PEG at 0", "canvas 40"),
        **of_study("cpvt_sizes"),
    ),
    Claim(
        CPVT,
        "Table 2",
        "after training with crops of many scales PEG gains on zoomed images",
        contrast=change("PEG at 0", "zoom 40"),
        **of_study("cpvt_sizes"),
    ),
    Claim(
        CPVT,
        "Table 2",
        "after training with crops of many scales PEG gains more, or loses less, than a learnable table: larger canvas",
        contrast=gain("PEG at 0", "learnable", "canvas 40"),
        **of_study("cpvt_sizes"),
    ),
    Claim(
        CPVT,
        "Table 2",
        "after training with crops of many scales PEG gains more, or loses less, than a learnable table: zoomed images",
        contrast=gain("PEG at 0", "learnable", "zoom 40"),
        **of_study("cpvt_sizes"),
    ),
    Claim(
        CPVT,
        "our control",
        "after training with crops of many scales PEG gains more, or loses less, than a learnable table with LaPE: "
        "larger canvas",
        contrast=gain("PEG at 0", "learnable, LaPE", "canvas 40"),
        **of_study("cpvt_sizes"),
    ),
    Claim(
        CPVT,
        "Table 2",
        "five PEGs beat one at the training size",
        contrast=difference("PEG at 0 to 4", "PEG at 0"),
        **of_study("cpvt_sizes"),
    ),
    Claim(
        CPVT,
        "Table 3",
        "average pooling helps PEG more than a learnable table",
        contrast=(*difference("PEG, GAP", "PEG"), *difference("learnable", "learnable, GAP")),
        **of_study("cpvt_pooling"),
    ),
    Claim(
        CPVT,
        "Table 6",
        "insert position 0 is better than a late one",
        contrast=difference("PEG at 0", "PEG at 2"),
        **of_study("cpvt_forms"),
    ),
    *(
        Claim(CPVT, where, text, contrast=difference(choice, reference), equal=equal, **of_study("cpvt_forms"))
        for where, text, choice, reference, equal in (
            ("Table 5", "a PEG with fixed random weights helps", "PEG, fixed", "none", False),
            (
                "Table 5",
                "more parameters that do not read neighbors help less than a PEG",
                "PEG at 0",
                "four 1 x 1 layers",
                False,
            ),
            ("section 5.1", "a PEG for only queries and keys helps", "PEG for queries and keys", "none", False),
            ("Table 6", "insert position 0 is better than -1", "PEG at 0", "PEG at -1", False),
            ("Table 6", "a kernel of the whole grid fixes insert position -1", "PEG at -1, 9 x 9", "PEG at -1", False),
            ("Table 7", "a learnable table improves one PEG", "PEG and learnable", "PEG at 0", False),
            ("Tables 7, 12", "PEGs in more layers are better than one", "PEG at 0 to 3", "PEG at 0", False),
            ("Table 11", "zero padding matters", "PEG at 0", "PEG, no padding", False),
            ("our control", "zero padding is better than padding without a border", "PEG at 0", "PEG, circular", False),
        )
    ),
    Claim(
        CPVT,
        "sections 3.2, B.3",
        "with zero padding a PEG encodes absolute position, which a model without encoding lacks",
        variant="place",
        contrast=difference("encoding=peg", "encoding=none"),
        **GYM,
    ),
    Claim(
        CPVT,
        "Table 2",
        "with more tokens PEG keeps absolute position better than a learnable table",
        variant="place",
        contrast=gain("encoding=peg", "encoding=learnable", "9 cells"),
        **GYM,
    ),
    Claim(
        CPVT,
        "Table 2",
        "with more tokens PEG keeps the border of the image better than a learnable table",
        variant="border",
        contrast=gain("encoding=peg", "encoding=learnable", "9 cells"),
        **GYM,
    ),
    Claim(
        CPVT,
        "Table 4",
        "PEG costs 1.4 % of the throughput",
        "python benchmarks/peg.py",
        test="CPVT-Ti relative to DeiT-Ti on a CPU",
        verdict=BEFORE,
    ),
    Claim(
        CPVT,
        "section 4.5",
        "hard distillation helps (there CPVT on ImageNet)",
        "graticule compare digits_distilled --choices distillation.form=hard distillation.teacher=RUN",
        test="a small ViT with LaPE on 500 digits, with a small teacher",
        verdict=BEFORE,
    ),
    Claim(
        CPVT,
        "Tables 13, 15",
        "PEG helps PVT and Swin on ImageNet, and PVT in detection on COCO and segmentation on ADE20K",
        test="needs ImageNet, COCO and ADE20K",
        verdict=NEVER,
    ),
    Claim(
        CPVT,
        "section 3.2",
        "away from the borders PEG is translation-equivariant",
        test="tests/encodings/test_conditional.py::test_with_a_border_it_is_so_inside_and_not_at_the_border",
        verdict="exact",
    ),
    *(
        Claim(
            POSMLP,
            "Table 1",
            f"{unit} beats the dense matrix in {model}",
            variant=model,
            contrast=difference(unit, "SGU"),
            **UNITS,
        )
        for model in ("gMLP", "PosMLP")
        for unit in ("LRPE-M", "LRPE", "GLRPE", "GGQPE")
    ),
    Claim(
        POSMLP,
        "Table 4",
        "groups of channels help: GGQPE beats GQPE",
        variant="PosMLP",
        contrast=difference("GGQPE", "GQPE"),
        **UNITS,
    ),
    *(
        Claim(POSMLP, where, text, contrast=contrast, **of_study("posmlp_forms"))
        for where, text, contrast in (
            ("Table 4", "more groups in later stages help", difference("GGQPE", "4 groups in both stages")),
            ("Table 6", "Gaussians of any direction beat isotropic ones", difference("GGQPE", "alpha I")),
            ("Table 6", "a learned center beats a fixed one", difference("GGQPE", "fixed center")),
            ("Table 7", "the bias helps", difference("GGQPE", "no bias")),
            (
                "Table 7",
                "a learnable table helps more without the bias than with it",
                (*difference("no bias, table", "no bias"), *difference("GGQPE", "table")),
            ),
        )
    ),
    *(
        Claim(POSMLP, "Table 10", text, contrast=difference(choice, reference), **of_study("posmlp_downsampling"))
        for text, choice, reference in (
            ("a gMLP with several stages beats one with a single stage", "linear, linear", "one stage"),
            ("a convolution before the first stage helps", "conv, linear", "linear, linear"),
            ("a convolution between the stages helps", "linear, conv", "linear, linear"),
        )
    ),
    Claim(
        POSMLP,
        "Figure 1 (f)",
        "with little data mixing by position helps",
        variant="500 digits",
        contrast=difference("GGQPE", "SGU"),
        **of_study("posmlp_share"),
    ),
    Claim(
        POSMLP,
        "Table 1",
        "mixing by position needs O(N) or O(1) parameters instead of O(N^2)",
        test="tests/encodings/test_mixing.py::test_parameters_are_those_that_the_paper_counts_or_should",
        verdict="exact",
    ),
    Claim(
        POSMLP,
        "Tables 2, 8, 9",
        "PosMLP beats comparable models on ImageNet and in detection",
        test="needs ImageNet and COCO",
        verdict=NEVER,
    ),
    Claim(
        NOTES,
        "section 3",
        "without position a transformer treats its tokens as a set",
        test="tests/backbones/test_forward.py::test_without_position_the_logits_do_not_see_the_order_of_the_patches",
        verdict="exact",
    ),
    Claim(
        NOTES,
        "footnote 17",
        "the causal mask alone carries order",
        test="tests/backbones/test_introduction.py::test_footnote_17_the_mask_encodes_the_order",
        verdict="exact",
    ),
    Claim(
        NOTES,
        "section 4.2",
        "a class token performs better than pooling",
        contrast=difference("learnable", "learnable, GAP"),
        **of_study("cpvt_pooling"),
    ),
]
