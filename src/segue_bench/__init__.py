"""How fast is it, and where does the time go? `segue bench`, and what the benchmarks in bench/ share with it."""
