"""HTTP server of OpenAI's and Anthropic's protocols over an `EngineClient`; `static/`: its page."""
