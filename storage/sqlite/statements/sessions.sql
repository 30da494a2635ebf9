-- name: find_session
SELECT session_key, revision, commit_id, commit_revision, epoch, renewals, holder
FROM session
WHERE tenant_id = :tenant_id AND user_id = :user_id AND session_id = :session_id;

-- name: add_session
INSERT INTO session (tenant_id, user_id, session_id)
VALUES (:tenant_id, :user_id, :session_id);

-- name: set_lease
UPDATE session
SET epoch = :epoch, renewals = 0, holder_id = :holder_id, holder = :holder
WHERE session_key = :session_key;

-- name: renew_lease
UPDATE session
SET renewals = renewals + 1
WHERE tenant_id = :tenant_id AND user_id = :user_id AND session_id = :session_id
    AND epoch = :epoch AND holder_id IS NOT NULL;

-- name: end_lease
UPDATE session
SET holder_id = NULL, holder = NULL
WHERE session_key = :session_key;

-- name: held_by (across tenants: a dead process is fenced whoever its sessions belong to)
SELECT tenant_id, user_id, session_id
FROM session
WHERE holder_id = :holder_id
ORDER BY session_key;

-- name: end_leases_of (across tenants: as above)
UPDATE session
SET holder_id = NULL, holder = NULL
WHERE holder_id = :holder_id;

-- name: add_fenced (across tenants: as above)
INSERT OR IGNORE INTO fenced_holder (holder_id)
VALUES (:holder_id);

-- name: is_fenced (across tenants: as above)
SELECT 1
FROM fenced_holder
WHERE holder_id = :holder_id;

-- name: read_session
SELECT session.revision, session.replayable, state.body, state.checksum
FROM session
LEFT JOIN state ON state.session_key = session.session_key
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
