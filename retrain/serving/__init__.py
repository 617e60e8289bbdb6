"""A server for base models and adapters: OpenAI's protocol with vLLM's additions, over the engine that also trains."""
