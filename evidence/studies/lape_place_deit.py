"""Why LaPE helps, in DeiT-Ti on all of Fashion-MNIST: place, amplitude and norm, and a PEG; for a GPU."""

from evidence.studies import EXACT, Study


def study() -> Study:
    """Compare five choices on 14 x 14 patches of 2 pixels, and on zoomed images of 20 x 20 and 28 x 28 patches."""
    choices = {
        "once, std 0.02": {"encoding": "learnable"},
        "once, std 1": {"encoding": EXACT},
        "beside, std 1": {"encoding": EXACT, "joining": "lape(decomposition='w')"},
        "beside, LN chain": {"encoding": "learnable", "joining": "lape"},
        "PEG, GAP": {"encoding": "peg", "global_pool": "avg"},
    }
    return Study(
        question="Does LaPE help DeiT-Ti on all of Fashion-MNIST by where the table is added, by its amplitude, or by "
        "its norm, and is a PEG with average pooling as good?",
        recipe="fashion_mnist",
        choices=choices,
        base={
            "model": "deit_tiny_patch16_224",
            "patch_size": 2,
            "drop_path_rate": 0.0,
            "batch_size": 120,
            "eval_batch_size": 1000,
            "lr": 5e-4,
            "epochs": 3,
            "warmup_epochs": 0,
            "warmup_steps": 150,
            "precision": "bf16-mixed",
            "compile": True,
            "workers": 0,
        },
        seeds=tuple(range(300, 312)),
        sizes=((40, 40), (56, 56)),
        limits="Three epochs are a tenth of the usual training. The GPU had time for these seeds only.",
        expects={
            **{"grid": "14 x 14", "layers": 12, "images": 60_000},
            **{name: {"std": float(name.split("std ")[1])} for name in choices if "std" in name},
            "PEG, GAP": {"encoding": "peg(places=[0])", "model": "deit_tiny_patch16_224", "global_pool": "avg"},
            "beside, LN chain": {"std": 0.02, "joining": "lape(decomposition='layer_norm')"},
        },
        seconds=15,
    )
