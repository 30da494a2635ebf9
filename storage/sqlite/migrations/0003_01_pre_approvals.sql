-- Requests for approval: stored before anybody sees them, settled by compare-and-set. The checksum covers the
-- request. Code of the version before deletes sessions and runs without knowing of them, hence the cascades.

CREATE TABLE approval (
    approval_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL REFERENCES session ON DELETE CASCADE,
    run_key INTEGER NOT NULL REFERENCES run ON DELETE CASCADE,
    tenant_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    approval_id TEXT NOT NULL,
    tool_name TEXT NOT NULL,
    digest TEXT NOT NULL,
    request BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    requested_at REAL NOT NULL,
    expires_at REAL NOT NULL,
    state TEXT NOT NULL,
    decided_at REAL,
    decided_by TEXT NOT NULL,
    reason TEXT NOT NULL,
    UNIQUE (tenant_id, user_id, approval_id)
);

-- To settle what a run leaves behind, and to list and delete.
CREATE INDEX approval_by_run ON approval (run_key);
CREATE INDEX approval_by_session ON approval (session_key);
CREATE INDEX approval_by_state ON approval (state, approval_key);
