"""An OpenAI-compatible API on the device, and a page: applications talk to it as they would to a provider."""
