"""The room that answers: what happens in one turn?"""
