"""Tasks, training of the embedded model, and measurements; not part of the installed package."""
