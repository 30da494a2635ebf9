-- name: read_session
SELECT
    session.revision, session.replayable, state.body, state.checksum, origin.body, origin.checksum
FROM session
LEFT JOIN state ON state.session_key = session.session_key
LEFT JOIN origin ON origin.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id;

-- name: read_conversations
SELECT conversation.execution_id, conversation.size
FROM session
JOIN conversation ON conversation.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id;

-- name: read_messages
SELECT conversation.execution_id, message.position, message.body, message.checksum
FROM session
JOIN conversation ON conversation.session_key = session.session_key
JOIN message ON message.conversation_key = conversation.conversation_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
ORDER BY conversation.execution_id, message.position;

-- name: read_attestations
SELECT attestation.position, attestation.body, attestation.checksum
FROM session
JOIN attestation ON attestation.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
ORDER BY attestation.position;

-- name: advance_session
UPDATE session
SET revision = :revision, commit_id = :commit_id, commit_revision = :revision, replayable = :replayable
WHERE session_key = :session_key;

-- name: clear_session
UPDATE session
SET revision = 0, replayable = 0
WHERE session_key = :session_key;

-- name: clear_conversations
DELETE FROM conversation
WHERE session_key = :session_key;

-- name: clear_state
DELETE FROM state
WHERE session_key = :session_key;

-- name: clear_attestations
DELETE FROM attestation
WHERE session_key = :session_key;

-- name: clear_origin
DELETE FROM origin
WHERE session_key = :session_key;

-- name: clear_artifacts
DELETE FROM artifact
WHERE session_key = :session_key;

-- name: find_conversation
SELECT conversation_key, size
FROM conversation
WHERE session_key = :session_key AND execution_id = :execution_id;

-- name: add_conversation
INSERT INTO conversation (session_key, execution_id, size)
VALUES (:session_key, :execution_id, :size);

-- name: grow_conversation
UPDATE conversation
SET size = :size
WHERE conversation_key = :conversation_key;

-- name: add_message
INSERT INTO message (conversation_key, position, body, checksum)
VALUES (:conversation_key, :position, :body, :checksum);

-- name: set_state
INSERT INTO state (session_key, body, checksum)
VALUES (:session_key, :body, :checksum)
ON CONFLICT (session_key) DO UPDATE SET body = excluded.body, checksum = excluded.checksum;

-- name: add_attestation
INSERT INTO attestation (session_key, position, body, checksum)
VALUES (
    :session_key,
    (SELECT count(*) FROM attestation WHERE session_key = :session_key),
    :body,
    :checksum
);

-- name: is_blank
SELECT
    session.revision = 0 AND session.replayable = 1 AND session.commit_id IS NULL AND session.fork_id IS NULL
    AND NOT EXISTS (SELECT 1 FROM run WHERE run.session_key = session.session_key)
    AND NOT EXISTS (SELECT 1 FROM artifact WHERE artifact.session_key = session.session_key)
FROM session
WHERE session_key = :session_key;

-- name: fork_session
UPDATE session
SET
    revision = 1,
    fork_id = :fork_id,
    replayable = (SELECT source.replayable FROM session AS source WHERE source.session_key = :source_key)
WHERE session_key = :session_key;

-- name: set_origin
INSERT INTO origin (session_key, body, checksum)
VALUES (:session_key, :body, :checksum);

-- name: copy_messages
INSERT INTO message (conversation_key, position, body, checksum)
SELECT :target_key, position, body, checksum
FROM message
WHERE conversation_key = :conversation_key AND position < :size;

-- name: copy_state
INSERT INTO state (session_key, body, checksum)
SELECT :target_key, body, checksum
FROM state
WHERE session_key = :session_key;

-- name: add_artifact
INSERT INTO artifact (session_key, artifact_id, mime_type, body, checksum)
VALUES (:session_key, :artifact_id, :mime_type, :body, :checksum)
ON CONFLICT (session_key, artifact_id) DO NOTHING;

-- name: read_artifact
SELECT artifact.mime_type, artifact.body, artifact.checksum
FROM session
JOIN artifact ON artifact.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
    AND artifact.artifact_id = :artifact_id;

-- name: list_artifacts
SELECT artifact.artifact_id
FROM session
JOIN artifact ON artifact.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
ORDER BY artifact.artifact_id;
