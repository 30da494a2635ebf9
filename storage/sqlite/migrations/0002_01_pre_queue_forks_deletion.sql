-- Runs that wait, sessions that were forked, attested or deleted.

-- A later session of a deleted one's address must begin above its epochs, and no row is left to say which.
INSERT INTO meta (name, value) VALUES ('epoch_floor', '0');

-- The fork that made a session, so that a repeat of it is told from another session of that name.
ALTER TABLE session ADD COLUMN fork_id TEXT;

CREATE TABLE origin (
    session_key INTEGER PRIMARY KEY REFERENCES session,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL
);

CREATE TABLE attestation (
    session_key INTEGER NOT NULL REFERENCES session,
    position INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session_key, position)
);

-- What a queued run was started with is NULL where there is nothing.
ALTER TABLE run ADD COLUMN queued INTEGER NOT NULL DEFAULT 0;
ALTER TABLE run ADD COLUMN start BLOB;
ALTER TABLE run ADD COLUMN start_checksum INTEGER;

-- A session's runs, to list, count and delete them.
CREATE INDEX run_by_session ON run (session_key);
