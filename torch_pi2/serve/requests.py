"""What clients of OpenAI's API send: fields, their bounds, and those that are refused because they are not done."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: Log probabilities that are told of a token, at most.
MOST_LOGPROBS = 20
#: Fields that would change the answer and are not done, and the values that mean nothing.
_NOT_DONE: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (None, 0, 0.0),
    "presence_penalty": (None, 0, 0.0),
    "best_of": (None, 1),
    "suffix": (None, ""),
    "echo": (None, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "audio": (None,),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "web_search_options": (None,),
}


class StreamOptions(BaseModel):
    include_usage: bool = False


class JsonSchema(BaseModel):
    """``schema`` under another name, which pydantic has for itself."""

    model_config = ConfigDict(populate_by_name=True)

    wanted: dict[str, Any] | bool = Field(default=True, alias="schema")


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | bool | None:
        """What an answer has to be; None: any text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.wanted
        return {"type": "object"} if self.type == "json_object" else None


class Asked(BaseModel):
    """What completions and chats have in common. Fields that nobody knows are left out of account, as OpenAI does."""

    model_config = ConfigDict(extra="allow")

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: list[str] = Field(default_factory=list, max_length=4)
    seed: int | None = None
    logit_bias: dict[int, float] = Field(default_factory=dict, max_length=1024)
    response_format: ResponseFormat | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [] if value is None else [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string is empty")
        return value

    @field_validator("temperature", "top_p", "n", "logit_bias", mode="before")
    @classmethod
    def _default(cls, value: Any, info: Any) -> Any:
        """OpenAI's null is the default."""
        return cls.model_fields[info.field_name].get_default(call_default_factory=True) if value is None else value

    @model_validator(mode="after")
    def _done(self) -> Asked:
        for name, nothing in _NOT_DONE.items():
            if (self.model_extra or {}).get(name) not in nothing:
                raise ValueError(f"{name} is not supported")
        return self

    @property
    def top(self) -> int | None:
        """Log probabilities of so many most likely tokens; None: of none, nor of the one taken."""
        raise NotImplementedError


class Completion(Asked):
    """``POST /v1/completions``. ``prompt``: texts or token ids, one or several."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Any] = self.prompt
        return [several] if several and isinstance(several[0], int) else several


class Chat(Asked):
    """``POST /v1/chat/completions``."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
