"""What do the nouns of the Responses API mean, in which every API speaks to a turn, and what are their bytes?"""
