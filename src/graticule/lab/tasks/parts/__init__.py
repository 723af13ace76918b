"""Parts of tasks: models, scores and evaluations, one file each; they need PyTorch."""
