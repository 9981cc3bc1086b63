"""How much may this process hold, and what gives way when it holds more?"""
