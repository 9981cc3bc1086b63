"""Hours of mixed load on a whole installation, with what dies now and then: does anything grow, is anything lost?"""
