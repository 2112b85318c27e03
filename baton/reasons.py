"""`Reason`: stable names of the causes of errors, for programs. A leaf module."""

from enum import StrEnum

__all__ = ["Reason"]


class Reason(StrEnum):
    """Why a call was refused, where the status alone does not say it; each names one row of the
    table in generation.proto. Their texts are stable: programs compare them.
    """

    ANSWER_NOT_READ = "ANSWER_NOT_READ"
    ANSWER_TOO_LARGE = "ANSWER_TOO_LARGE"
    CALLS_FULL = "CALLS_FULL"
    CLIENT_CONCURRENCY = "CLIENT_CONCURRENCY"
    CLIENT_RATE = "CLIENT_RATE"
    MALFORMED_MESSAGE = "MALFORMED_MESSAGE"
    MODEL_NOT_ALLOWED = "MODEL_NOT_ALLOWED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    NOT_CONFIGURED = "NOT_CONFIGURED"
    NOT_RESUMED = "NOT_RESUMED"
    NO_REPLICA_FITS = "NO_REPLICA_FITS"
    NO_REPLICA_READY = "NO_REPLICA_READY"
    OVERLOADED = "OVERLOADED"
    PROMPT_TOO_LONG = "PROMPT_TOO_LONG"
    REPLICAS_FULL = "REPLICAS_FULL"
    REPLICAS_LOST = "REPLICAS_LOST"
    REQUEST_DEADLINE = "REQUEST_DEADLINE"
    REQUEST_ID_IN_USE = "REQUEST_ID_IN_USE"
    REQUEST_NOT_RECEIVED = "REQUEST_NOT_RECEIVED"
    ROUTER_DEADLINE = "ROUTER_DEADLINE"
    ROUTER_FULL = "ROUTER_FULL"
    SERVER_STARTING = "SERVER_STARTING"
    UNKNOWN_FIELD = "UNKNOWN_FIELD"
