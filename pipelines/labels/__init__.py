"""Knowledge of slides: labels, splits, annotations and their masks."""
