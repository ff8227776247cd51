"""HTTP server that speaks OpenAI's and Anthropic's protocols on top of an `EngineClient`."""
