"""LaPE's Table 7 on digits: encodings and joinings, with a control for the amplitude of the table."""

from graticule.lab.studies.study import Study


def study() -> Study:
    """Compare four encodings, each with its joinings, and a learnable table that starts at the amplitude of a norm."""
    encodings = {"learnable": "learnable", "sinusoidal 1-D": "sinusoidal_1d", "sinusoidal 2-D": "sinusoidal_2d"}
    joinings = {"shared": "shared", "LaPE sharing": "lape_sharing", "LaPE": "lape"}
    choices: dict[str, dict[str, str]] = {}
    for name, encoding in encodings.items():
        choices[name] = {"encoding": encoding}
        choices |= {f"{name}, {label}": {"encoding": encoding, "joining": how} for label, how in joinings.items()}
    choices["learnable, unshared"] = {"encoding": "learnable", "joining": "unshared"}
    choices["learnable, std 1"] = {"encoding": "learnable(std=1)"}
    choices["learnable, std 1, LaPE"] = {"encoding": "learnable(std=1)", "joining": "lape"}
    choices["relative bias"] = {"encoding": "relative_bias"}
    choices["relative bias, LaPE"] = {"encoding": "relative_bias", "joining": "lape"}
    against_default = tuple(
        (choice, choice.rpartition(", ")[0]) for choice in choices if choice.rpartition(", ")[0] in choices
    )
    return Study(
        question="Does LaPE beat the other joinings, and help more than a larger initial amplitude does?",
        recipe="digits_small",
        choices=choices,
        variants={"10 epochs": {"epochs": 10}, "40 epochs": {"epochs": 40}},
        without=tuple(
            (choice, "40 epochs")
            for choice in choices
            if choice not in ("learnable", "learnable, LaPE", "learnable, std 1")
        ),
        tests=(
            *against_default,
            ("learnable, LaPE", "learnable, std 1"),
            ("learnable, LaPE", "learnable, LaPE sharing"),
            ("learnable, LaPE", "relative bias"),
        ),
        controls="A table with std 1 starts with the amplitude that a norm gives it; with the default joining it "
        "shows the gain of the amplitude alone. There is no such control for sinusoids and the relative bias.",
        follows="LaPE (Yu et al., 2023), Table 7",
        limits="With few digits and few epochs, this measures the speed of learning as much as the final accuracy. "
        "40 epochs were planned for all choices, and run for three.",
        seconds={"10 epochs": 30, "40 epochs": 120},
    )
