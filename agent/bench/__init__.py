"""The warm process of a workspace at which tools are called, from a shell and over MCP."""
