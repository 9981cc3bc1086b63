"""Which turns run in this process, how do they begin, repeat, replay and end?"""
