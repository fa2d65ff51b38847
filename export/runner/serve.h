// Serves a bundle by OpenAI's API to programs on this machine.
#pragma once

#include <string>

#include "http/server.h"
#include "interrupts.h"
#include "session.h"

namespace pi2::runner {

// GET /health, GET /v1/models, POST /v1/chat/completions, POST /v1/completions: answered one by one, like lines of
// --requests, until a signal arrives. If a client disconnects, its answer ends. `ready` receives the address once
// clients are accepted; standard error gets a line for each answer. Throws Problem if clients cannot be accepted.
void serve_http(Session& session, const Options& o, HttpServer& server,
                const std::function<void(const std::string&)>& ready);

}  // namespace pi2::runner
