"""What do the workers of one service tell each other, and how does it get there?"""
