"""How does the model use the tools of remote servers (MCP)?"""
