"""A small OpenAI-compatible server on loopback, with the embedded model or a scripted answer behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from retinue.messages import Message, ToolCall
from retinue.models import ModelRequest, ModelResponse, ToolSchema
from retinue.providers.extractive import ExtractiveModel

HOLD = object()
RESET = object()


@dataclass
class ChatServer:
    """What the server was asked, and what it answers."""

    url: str = ""
    delay: float = 0.0
    """Seconds before each answer."""
    answer: tuple[int, str, bytes] | None = None
    """(status, content type, body) for every request; the embedded model answers when ``None``."""
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every answer that is no stream."""
    answers: list[tuple[int, str, bytes]] = field(default_factory=list)
    """Given first, one for each request, before ``answer``."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    """The Authorization header of each request."""
    pieces: list[object] | None = None
    """Chunks of every stream: JSON data, bytes as they are, ``HOLD`` to wait until ``go`` is set, or
    ``RESET`` to break the connection."""
    go: threading.Event = field(default_factory=threading.Event)
    held: threading.Event = field(default_factory=threading.Event)
    """A stream waits at ``HOLD``."""
    left: threading.Event = field(default_factory=threading.Event)
    """A client went away while its stream was held."""

    def says(self, body: object, status: int = 200) -> None:
        """Answer every request with this JSON."""
        self.answer = (status, "application/json", json.dumps(body).encode())

    def streams(self, *pieces: object, done: bool = True) -> None:
        """Answer every request for a stream with these chunks."""
        self.pieces = [*pieces, b"data: [DONE]\n\n"] if done else list(pieces)

    def stream(self, body: bytes, out: socket.socket) -> bool:
        """Answer a request for a stream, if this is one and there are pieces to answer with."""
        asked = json.loads(body)
        if self.pieces is None or not asked.get("stream"):
            return False
        self.requests.append(asked)
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        out.sendall(head.encode())
        for piece in self.pieces:
            if piece is HOLD:
                self.held.set()
                if self._wait(out):
                    self.left.set()
                    return True
            elif piece is RESET:
                out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                out.close()
                return True
            elif isinstance(piece, bytes):
                out.sendall(piece)
            else:
                out.sendall(b"data: " + json.dumps(piece).encode() + b"\n\n")
        return True

    def _wait(self, out: socket.socket) -> bool:
        """Wait until ``go`` is set; true when the client leaves before."""
        while not self.go.is_set():
            if select.select([out], [], [], 0.01)[0] and not out.recv(1):
                return True
        return False

    def respond(self, body: bytes) -> tuple[int, str, bytes]:
        asked = json.loads(body)
        self.requests.append(asked)
        time.sleep(self.delay)
        if self.answers:
            return self.answers.pop(0)
        if self.answer is not None:
            return self.answer
        response = asyncio.run(ExtractiveModel().generate(_request(asked)))
        return 200, "application/json", json.dumps(_completion(response)).encode()


@contextlib.contextmanager
def chat_server(delay: float = 0.0, port: int = 0) -> Iterator[ChatServer]:
    """Serve until the block ends."""
    state = ChatServer(delay=delay)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            state.keys.append(self.headers.get("Authorization"))
            asked = self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if state.stream(asked, self.connection):
                    self.close_connection = True
                    return
            status, kind, body = state.respond(asked)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                for name, value in state.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that went away

    server = Server(("127.0.0.1", port), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _request(asked: dict[str, Any]) -> ModelRequest:
    messages = [
        Message(
            role=message["role"],
            content=message["content"] or "",
            tool_calls=tuple(
                ToolCall(call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ),
            tool_call_id=message.get("tool_call_id"),
        )
        for message in asked["messages"]
    ]
    tools = [ToolSchema(**tool["function"]) for tool in asked.get("tools", ())]
    return ModelRequest(messages=messages, tools=tools, max_tokens=asked.get("max_tokens"))


def _completion(response: ModelResponse) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": response.text or None}
    if response.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in response.tool_calls
        ]
    assert response.usage is not None
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": response.finish_reason, "message": message}],
        "usage": {
            "prompt_tokens": response.usage.input_tokens,
            "completion_tokens": response.usage.output_tokens,
            "total_tokens": response.usage.total_tokens,
        },
    }
