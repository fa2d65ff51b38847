"""Requests of OpenAI's API: fields, bounds, and unsupported fields, which are refused."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: Maximum number of most likely tokens to report with each token.
MOST_LOGPROBS = 20
#: Maximum length of a stop string: text is compared with all of its prefixes.
MOST_STOP = 1000
#: Unsupported fields that would change the answer, and their neutral values.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("audio", "moderation", "reasoning_effort", "web_search_options"), (None,)),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "modalities": (None, ["text"]),
    "suffix": (None, ""),
    "verbosity": (None, "medium"),
}
_NO_TOOLS: dict[str, tuple[Any, ...]] = {"tools": (None, []), "tool_choice": (None, "none", "auto")}
_NO_TOOLS["parallel_tool_calls"] = (None, True)
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class StreamOptions(BaseModel):
    include_usage: bool = False


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _whole(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        if self.type == "json_schema" and not isinstance(self.schema_wanted, (dict, bool)):
            raise ValueError("json_schema.schema: expected an object, true or false")
        return self

    @property
    def schema_wanted(self) -> dict[str, Any] | bool | None:
        """The schema of the answer; None: any text."""
        if self.type == "json_schema" and self.json_schema is not None:
            return self.json_schema.get("schema", True)
        return {"type": "object"} if self.type == "json_object" else None


class FunctionCall(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str
    arguments: str = ""

    @property
    def values(self) -> Any:
        """The arguments for a template: a dict, or the text if it is not a JSON object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return value if isinstance(value, dict) else self.arguments


class ToolCall(BaseModel):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
    """A message. Further fields (``name``, ``reasoning_content``) are passed to the template."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _joined_parts(cls, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        texts = []
        for number, part in enumerate(value):
            kind = part.get("type") if isinstance(part, dict) else None
            text = part.get(kind) if kind in ("text", "refusal") else None
            if not isinstance(text, str):
                found = kind if isinstance(kind, str) and kind not in ("text", "refusal") else "its content"
                raise ValueError(f"part {number}: {found[:40]} is not supported, these models only read text")
            texts.append(text)
        return "".join(texts)

    @model_validator(mode="after")
    def _whole(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError("content is missing")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("tool_call_id is missing")
        return self

    def for_template(self) -> dict[str, Any]:
        """For Hugging Face's templates: without missing fields, arguments as dicts."""
        message = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        message |= {"role": "system" if self.role == "developer" else self.role, "content": self.content or ""}
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.function.name, "arguments": call.function.values}}
                | ({} if call.id is None else {"id": call.id})
                for call in self.tool_calls
            ]
        return message if self.tool_call_id is None else message | {"tool_call_id": self.tool_call_id}


class ToolFunction(BaseModel):
    name: _Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_wanted(self) -> dict[str, Any]:
        none = {"type": "object", "properties": {}, "additionalProperties": False}
        return none if self.parameters is None else {"type": "object"} | self.parameters

    def for_template(self) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **about, "parameters": parameters}}

    @field_validator("parameters")
    @classmethod
    def _object_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type", "object") != "object":
            raise ValueError("expected the schema of an object")
        return value


class Tool(BaseModel):
    type: Literal["function"]
    function: ToolFunction


class _Named(BaseModel):
    name: str


class ChosenFunction(BaseModel):
    type: Literal["function"]
    function: _Named


class _Allowed(BaseModel):
    mode: Literal["auto", "required"]
    tools: list[ChosenFunction] = Field(min_length=1)


class AllowedTools(BaseModel):
    type: Literal["allowed_tools"]
    allowed_tools: _Allowed


class GenerationRequest(BaseModel):
    """Fields of completions and chats. Unknown fields are ignored, as OpenAI does."""

    model_config = ConfigDict(extra="allow")
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = _UNSUPPORTED

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    n: int = Field(default=1, ge=1, le=128)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stop: list[Annotated[str, Field(max_length=MOST_STOP)]] = Field(default_factory=list, max_length=4)
    seed: int | None = None
    logit_bias: dict[int, _Bias] = Field(default_factory=dict, max_length=1024)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    response_format: ResponseFormat | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise ValueError("a stop string is empty")
        return value

    @model_validator(mode="before")
    @classmethod
    def _valid_json(cls, value: Any) -> Any:
        """Refuse half surrogate pairs and NaN, which can neither be tokenised nor reported in an error."""
        if isinstance(value, bytes):
            raise ValueError("expected JSON, declared as such (Content-Type: application/json)")
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError("a text has half of a surrogate pair") from error
        except RecursionError as error:
            raise ValueError("lists or objects are too deep in each other") from error
        except ValueError as error:
            raise ValueError("NaN and Infinity are no numbers of JSON") from error
        return value

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, value: Any) -> Any:
        """A null means the default."""
        if not isinstance(value, dict):
            return value
        defaults = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {name: one for name, one in value.items() if one is not None or name not in defaults}

    @model_validator(mode="after")
    def _supported(self) -> "GenerationRequest":
        for name, nothing in self.unsupported.items():
            if (self.model_extra or {}).get(name) not in nothing:
                raise ValueError(f"{name} is not supported")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for streams: stream is not true")
        return self

    @property
    def top(self) -> int | None:
        """Report this many most likely tokens with each token; None: no log probabilities."""
        raise NotImplementedError


class CompletionRequest(GenerationRequest):
    """``POST /v1/completions``. ``prompt``: texts or token ids, one or several."""

    unsupported = _UNSUPPORTED | _NO_TOOLS

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    echo: bool = False
    best_of: int | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_kind(cls, value: Any) -> Any:
        several = value if isinstance(value, list) else [value]

        def ids(tokens: Any) -> bool:
            return isinstance(tokens, list) and all(type(token) is int for token in tokens)

        if all(isinstance(text, str) for text in several) or ids(value) or all(map(ids, several)):
            return value
        raise ValueError("expected a text, token ids, or a list of texts or of lists of token ids")

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported, unless it is n")
        if self.echo and self.logprobs is not None:
            raise ValueError("logprobs is not supported with echo: there are none of prompts")
        return self

    @property
    def top(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        several: list[Any] = self.prompt
        return several if several and not isinstance(several[0], int) else [several]


class ChatRequest(GenerationRequest):
    """``POST /v1/chat/completions``."""

    unsupported = _UNSUPPORTED | {"best_of": (None, 1), "echo": (None, False)}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list, max_length=128)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedTools | None = None
    parallel_tool_calls: bool = True

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _one_choice(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") == "function":
            return ChosenFunction.model_validate(value)
        if isinstance(value, dict) and value.get("type") == "allowed_tools":
            return AllowedTools.model_validate(value)
        if value not in (None, "none", "auto", "required"):
            raise ValueError("expected none, auto, required, a function or allowed_tools")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have the same name")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice: there are no tools")
        missing = [name for name in self._chosen or [] if name not in names]
        if missing:
            raise ValueError(f"tool_choice: {missing[0][:64]} is none of the tools {', '.join(names)}")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: logprobs is not true")
        return self

    @property
    def _chosen(self) -> list[str] | None:
        if isinstance(self.tool_choice, ChosenFunction):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedTools):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return None

    @property
    def callable_tools(self) -> list[Tool]:
        chosen = self._chosen
        none = self.tool_choice == "none"
        return [tool for tool in self.tools if not none and (chosen is None or tool.function.name in chosen)]

    @property
    def call_required(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, ChosenFunction)

    @property
    def several(self) -> bool:
        """Whether more than one call is allowed."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, ChosenFunction)

    @property
    def template_tools(self) -> list[dict[str, Any]] | None:
        return [tool.function.for_template() for tool in self.callable_tools] or None

    @property
    def template_messages(self) -> list[dict[str, Any]]:
        """The messages for a template; results of tools get the name of the function."""
        names: dict[str | None, str] = {}
        messages = []
        for message in self.messages:
            names |= {call.id: call.function.name for call in message.tool_calls or []}
            known = {"name": names[message.tool_call_id]} if message.tool_call_id in names else {}
            messages.append((known if message.role == "tool" else {}) | message.for_template())
        return messages

    @property
    def top(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


AnyRequest = CompletionRequest | ChatRequest
