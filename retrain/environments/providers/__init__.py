"""Adapt environments of other libraries to ``environments.protocol``. No library is imported here."""

_HERE = "retrain.environments.providers"

# ``module:class`` by the provider's name in a configuration, which is also the module name of its library
PROVIDERS = {
    "reasoning_gym": f"{_HERE}.reasoning_gym:ReasoningGym",
    "verifiers": f"{_HERE}.verifiers:Verifiers",
    "openenv": f"{_HERE}.openenv:OpenEnv",
}
