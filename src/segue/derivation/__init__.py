"""How does a model write that no row of the table knows? Worked out from its own chat template, and proven."""
