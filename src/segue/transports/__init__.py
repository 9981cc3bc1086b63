"""The room that answers: how do bytes arrive and leave?"""
