"""The room that answers: how does this model family write and read?"""
