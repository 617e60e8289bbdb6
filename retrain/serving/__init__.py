"""Serve base models and adapters over OpenAI's protocol with vLLM's additions, with the engine that training uses."""
