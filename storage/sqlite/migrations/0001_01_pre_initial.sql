-- The first schema. Columns named *_key are this file's own numbers; ids are the application's.
-- Content is kept as BLOB, so that any byte passes, beside its CRC-32, so that damage is noticed.

CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;

-- Migrations that were applied, by file name.
CREATE TABLE migration (
    name TEXT PRIMARY KEY
) WITHOUT ROWID;

-- A session's place, last commit and lease. The epoch stays when the lease ends: the next one is higher.
CREATE TABLE session (
    session_key INTEGER PRIMARY KEY,
    tenant_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    session_id TEXT NOT NULL,
    revision INTEGER NOT NULL DEFAULT 0,
    replayable INTEGER NOT NULL DEFAULT 1,
    commit_id TEXT,
    commit_revision INTEGER NOT NULL DEFAULT 0,
    epoch INTEGER NOT NULL DEFAULT 0,
    renewals INTEGER NOT NULL DEFAULT 0,
    holder_id TEXT,
    holder BLOB,
    UNIQUE (tenant_id, user_id, session_id)
);

CREATE INDEX session_by_holder ON session (holder_id) WHERE holder_id IS NOT NULL;

-- Holders whose death was confirmed: nothing that they send late is accepted.
CREATE TABLE fenced_holder (
    holder_id TEXT PRIMARY KEY
) WITHOUT ROWID;

-- Message lists by execution id; canonical history is the one with an empty id.
CREATE TABLE conversation (
    conversation_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL REFERENCES session,
    execution_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    UNIQUE (session_key, execution_id)
);

CREATE TABLE message (
    conversation_key INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
    position INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (conversation_key, position)
);

-- Apart from session, whose row changes at every renewal.
CREATE TABLE state (
    session_key INTEGER PRIMARY KEY REFERENCES session,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL
);

CREATE TABLE artifact (
    session_key INTEGER NOT NULL REFERENCES session,
    artifact_id TEXT NOT NULL,
    mime_type TEXT NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session_key, artifact_id)
);

-- A run is found by identity and run id, without its session. The checksum covers the input.
CREATE TABLE run (
    run_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL REFERENCES session,
    tenant_id TEXT NOT NULL,
    user_id TEXT NOT NULL,
    run_id TEXT NOT NULL,
    root_run_id TEXT NOT NULL,
    parent_run_id TEXT,
    app TEXT NOT NULL,
    input BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    created_at REAL NOT NULL,
    reserved_to INTEGER NOT NULL,
    final_cursor INTEGER,
    outcome BLOB,
    outcome_checksum INTEGER,
    UNIQUE (tenant_id, user_id, run_id)
);

CREATE INDEX run_open ON run (session_key) WHERE outcome IS NULL;

CREATE TABLE event (
    run_key INTEGER NOT NULL REFERENCES run,
    sequence INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_key, sequence)
);
