"""The room that answers: what do the bytes mean?"""
