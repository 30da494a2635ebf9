-- A store as version 2 of the schema left it: one session that is held, with runs that ended, that goes on and
-- that waits, attested and forked; the fork; and the epoch floor of one that was deleted.
BEGIN TRANSACTION;
CREATE TABLE artifact (
    session_key INTEGER NOT NULL REFERENCES session,
    artifact_id TEXT NOT NULL,
    mime_type TEXT NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session_key, artifact_id)
);
INSERT INTO "artifact" VALUES(1,'a','text/plain',X'0064617461',1251335010);
CREATE TABLE attestation (
    session_key INTEGER NOT NULL REFERENCES session,
    position INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (session_key, position)
);
INSERT INTO "attestation" VALUES(1,0,X'7B226279223A2261207265766965776572222C22776879223A2265766572792063616C6C206861732069747320726573756C74222C227265766973696F6E223A312C226174223A313730303030303030312E357D',1319097859);
CREATE TABLE conversation (
    conversation_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL REFERENCES session,
    execution_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    UNIQUE (session_key, execution_id)
);
INSERT INTO "conversation" VALUES(1,1,'',2);
INSERT INTO "conversation" VALUES(2,1,'ended',1);
INSERT INTO "conversation" VALUES(3,2,'',1);
CREATE TABLE event (
    run_key INTEGER NOT NULL REFERENCES run,
    sequence INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_key, sequence)
);
INSERT INTO "event" VALUES(1,1,X'226576656E74203122',3970668029);
INSERT INTO "event" VALUES(2,1,X'22626567756E22',192267115);
CREATE TABLE fenced_holder (
    holder_id TEXT PRIMARY KEY
) WITHOUT ROWID;
CREATE TABLE message (
    conversation_key INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
    position INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (conversation_key, position)
);
INSERT INTO "message" VALUES(1,0,X'226F6E6522',2445628416);
INSERT INTO "message" VALUES(1,1,X'2274776F22',4291163371);
INSERT INTO "message" VALUES(2,0,X'226F6E6522',2445628416);
INSERT INTO "message" VALUES(3,0,X'226F6E6522',2445628416);
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO "meta" VALUES('epoch_floor','2');
INSERT INTO "meta" VALUES('schema_version','2');
INSERT INTO "meta" VALUES('store_id','70293ffa-e27d-4e49-99d1-5379ae51275c');
CREATE TABLE migration (
    name TEXT PRIMARY KEY
) WITHOUT ROWID;
INSERT INTO "migration" VALUES('0001_01_pre_initial.sql');
INSERT INTO "migration" VALUES('0002_01_pre_queue_forks_deletion.sql');
CREATE TABLE origin (
    session_key INTEGER PRIMARY KEY REFERENCES session,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
INSERT INTO "origin" VALUES(2,X'7B2273657373696F6E5F6964223A2268656C64222C227265766973696F6E223A322C226D65737361676573223A317D',2370194452);
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
    outcome_checksum INTEGER, queued INTEGER NOT NULL DEFAULT 0, start BLOB, start_checksum INTEGER,
    UNIQUE (tenant_id, user_id, run_id)
);
INSERT INTO "run" VALUES(1,1,'t','u','ended','ended',NULL,'trial',X'2261207175657374696F6E22',560064569,1700000000.25,1024,2,X'7B22737461747573223A22636F6D706C65746564227D',856943894,0,NULL,NULL);
INSERT INTO "run" VALUES(2,1,'t','u','open','open',NULL,'trial',X'2261207175657374696F6E22',560064569,1700000000.25,2048,NULL,NULL,NULL,0,NULL,NULL);
INSERT INTO "run" VALUES(3,1,'t','u','waiting','waiting',NULL,'trial',X'2261207175657374696F6E22',560064569,1700000000.25,1024,NULL,NULL,NULL,1,X'7B2269665F62757379223A227175657565227D',2128599590);
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
    holder BLOB, fork_id TEXT,
    UNIQUE (tenant_id, user_id, session_id)
);
INSERT INTO "session" VALUES(1,'t','u','held',2,1,'mark',2,3,0,'holder',X'7B22686F6C6465725F6964223A22686F6C646572222C22636C75737465725F6964223A22747269616C222C22626F6F745F6964223A22616E6F74686572206D616368696E65222C22706964223A312C22737461727465645F6174223A302E307D',NULL);
INSERT INTO "session" VALUES(2,'t','u','fork',1,1,NULL,0,2,0,NULL,NULL,'fork');
CREATE TABLE state (
    session_key INTEGER PRIMARY KEY REFERENCES session,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
INSERT INTO "state" VALUES(1,X'7B226E223A317D',3561700222);
INSERT INTO "state" VALUES(2,X'7B226E223A317D',3561700222);
CREATE INDEX session_by_holder ON session (holder_id) WHERE holder_id IS NOT NULL;
CREATE INDEX run_open ON run (session_key) WHERE outcome IS NULL;
CREATE INDEX run_by_session ON run (session_key);
COMMIT;
