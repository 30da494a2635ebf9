"""Rows of the SQLite store: one connection's view of the file, inside a transaction of its user."""

from __future__ import annotations

from retinue.storage.sqlite.approval_rows import ApprovalRows
from retinue.storage.sqlite.content_rows import ContentRows
from retinue.storage.sqlite.run_rows import RunRows
from retinue.storage.sqlite.session_rows import SessionRows


class SQLiteRows(SessionRows, ContentRows, RunRows, ApprovalRows):
    """:class:`retinue.storage.rows.Rows` over a connection; the statements are in ``statements/*.sql``."""
