"""4a: which ids does an engine have already, so that only the rest is sent?"""
