"""How many tokens of a day and a month may a key or its owner still use?"""
