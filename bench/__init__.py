"""How a person measures Segue: each module prints numbers and says how they were taken."""
