"""Errors of the service and its runtime. The gateway maps this tree to HTTP codes in one place."""


class ServiceError(Exception):
    """Base class of the service's own errors."""


class SettingsError(ServiceError):
    """The settings file cannot be used; the message names the field."""


class FileError(ServiceError):
    """A file cannot be read or written; the message names the file and a remedy."""


class EngineBroken(ServiceError):
    """The engine that held a request ended with an error; its replica is being replaced."""
