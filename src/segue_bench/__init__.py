"""How fast is it, and where does the time go? `segue bench` and `segue bench load`: anyone can check the claim."""
