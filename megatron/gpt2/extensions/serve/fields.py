"""The fields of a client's JSON, taken one by one; an error names the field that is wrong."""

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard


class ApiError(Exception):
    """A request that is answered with an error. param: the field that is wrong. status: the code of HTTP."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status

    def json(self) -> dict[str, Any]:
        """The body of the answer, in OpenAI's form; `message` is for Megatron's client."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {"message": str(self), "type": kind, "param": self.param, "code": self.code},
            "message": str(self),
        }


class Fields:
    """The fields of a body that nobody has taken yet. ApiError where the body is no JSON object."""

    def __init__(self, body: bytes) -> None:
        try:
            given = json.loads(body.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ApiError(f"the body is not UTF-8: byte {error.start + 1} is 0x{body[error.start]:02x}") from None
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise ApiError("the body is not a JSON object")
        self._given = given

    def take(self, name: str, default: Any, must_be: str = "", good: Callable[[Any], bool] = lambda value: True) -> Any:
        """The field of this name, or `default` where it is absent or null. ApiError where it is not `good`."""
        value = self._given.pop(name, None)
        if value is None:
            return default
        if not good(value):
            raise ApiError(f"{name} must be {must_be}, not {reprlib.repr(value)}", param=name)
        return value

    def switch(self, name: str) -> bool:
        """The field of this name, which is true or false. Absent: false."""
        return bool(self.take(name, False, "true or false", lambda value: isinstance(value, bool)))

    def refuse(self, asking: Mapping[str, tuple[Any, ...]]) -> None:
        """Take the fields that are not supported. ApiError where one has a value that asks for something: any other
        than null and those listed, which some clients always send."""
        for name, neutral in asking.items():
            if self._given.pop(name, None) not in (None, *neutral):
                raise ApiError(f"{name} is not supported: leave it out", param=name)

    def end(self) -> None:
        """ApiError where a field is left that nobody has taken."""
        if self._given:
            name = min(self._given)
            raise ApiError(f"unrecognized request argument: {reprlib.repr(name)}", param=name)


def whole(value: Any, least: float, most: float) -> TypeGuard[int]:
    """Whether this is a whole number within these bounds."""
    return type(value) is int and least <= value <= most


def number(value: Any, least: float, most: float) -> TypeGuard[float]:
    """Whether this is a number within these bounds."""
    return type(value) in (int, float) and least <= value <= most
