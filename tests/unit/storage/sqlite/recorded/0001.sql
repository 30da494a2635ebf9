-- A store as version 1 of the schema left it: one session that is held, with runs; one that was imported and
-- released; one whose holder was fenced.
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
CREATE TABLE conversation (
    conversation_key INTEGER PRIMARY KEY,
    session_key INTEGER NOT NULL REFERENCES session,
    execution_id TEXT NOT NULL,
    size INTEGER NOT NULL,
    UNIQUE (session_key, execution_id)
);
INSERT INTO "conversation" VALUES(1,1,'',4);
INSERT INTO "conversation" VALUES(2,1,'ended',1);
INSERT INTO "conversation" VALUES(3,1,'child',1);
INSERT INTO "conversation" VALUES(4,2,'',1);
CREATE TABLE event (
    run_key INTEGER NOT NULL REFERENCES run,
    sequence INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (run_key, sequence)
);
INSERT INTO "event" VALUES(1,1,X'226576656E74203122',3970668029);
INSERT INTO "event" VALUES(1,2,X'226576656E74203222',3347498558);
INSERT INTO "event" VALUES(2,1,X'22626567756E22',192267115);
CREATE TABLE fenced_holder (
    holder_id TEXT PRIMARY KEY
) WITHOUT ROWID;
INSERT INTO "fenced_holder" VALUES('dead');
CREATE TABLE message (
    conversation_key INTEGER NOT NULL REFERENCES conversation ON DELETE CASCADE,
    position INTEGER NOT NULL,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL,
    PRIMARY KEY (conversation_key, position)
);
INSERT INTO "message" VALUES(1,0,X'226F6E6522',2445628416);
INSERT INTO "message" VALUES(1,1,X'2274776F22',4291163371);
INSERT INTO "message" VALUES(1,2,X'22615C75303030306222',2891177378);
INSERT INTO "message" VALUES(2,0,X'226F6E6522',2445628416);
INSERT INTO "message" VALUES(3,0,X'226322',1597518364);
INSERT INTO "message" VALUES(1,3,X'22746872656522',3196009290);
INSERT INTO "message" VALUES(4,0,X'22696D706F7274656422',4217648706);
CREATE TABLE meta (
    name TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
INSERT INTO "meta" VALUES('schema_version','1');
INSERT INTO "meta" VALUES('store_id','1765c641-8c3f-4657-a6e9-5aa8d01008a8');
CREATE TABLE migration (
    name TEXT PRIMARY KEY
) WITHOUT ROWID;
INSERT INTO "migration" VALUES('0001_01_pre_initial.sql');
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
INSERT INTO "run" VALUES(1,1,'t','u','ended','ended',NULL,'trial',X'2261207175657374696F6E22',560064569,1700000000.25,1024,3,X'7B22737461747573223A22636F6D706C65746564227D',856943894);
INSERT INTO "run" VALUES(2,1,'t','u','open','open',NULL,'trial',X'2261207175657374696F6E22',560064569,1700000000.25,2048,NULL,NULL,NULL);
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
INSERT INTO "session" VALUES(1,'t','u','held',2,0,'second',2,1,0,'holder',X'7B22686F6C6465725F6964223A22686F6C646572222C22636C75737465725F6964223A22747269616C222C22626F6F745F6964223A22616E6F74686572206D616368696E65222C22706964223A312C22737461727465645F6174223A302E307D');
INSERT INTO "session" VALUES(2,'t','v','released',0,0,NULL,0,2,0,NULL,NULL);
INSERT INTO "session" VALUES(3,'other','u','fenced',0,1,NULL,0,1,0,NULL,NULL);
CREATE TABLE state (
    session_key INTEGER PRIMARY KEY REFERENCES session,
    body BLOB NOT NULL,
    checksum INTEGER NOT NULL
);
INSERT INTO "state" VALUES(1,X'7B226E223A317D',3561700222);
CREATE INDEX session_by_holder ON session (holder_id) WHERE holder_id IS NOT NULL;
CREATE INDEX run_open ON run (session_key) WHERE outcome IS NULL;
COMMIT;
