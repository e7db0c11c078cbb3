"""HTML reports of a run, of several runs, and of a benchmark."""
