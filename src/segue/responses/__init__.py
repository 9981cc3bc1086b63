"""How do HTTP requests and WebSocket messages of the Responses API become turns, and events bytes?"""
