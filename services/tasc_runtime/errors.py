"""What can go wrong in the service. The gateway maps this tree to HTTP codes in one place."""


class ServiceError(Exception):
    """Root of the service's own errors."""


class SettingsError(ServiceError):
    """The settings file cannot be used; the message names the field."""


class EngineBroken(ServiceError):
    """The engine that held a request ended on an error; its replica is being replaced."""


class AdapterRefused(ServiceError):
    """Adapters of a newer version of a task cannot be loaded; the message names folder and why."""


class StaleProposer(ServiceError):
    """A proposer was made for a record or an index that has gone out of use meanwhile."""


class IndexRefused(ServiceError):
    """A draft index does not fit the target's tokenizer; the message names both fingerprints."""
