// A bundle behind OpenAI's API, for programs of this machine.
#pragma once

#include <string>

#include "http/server.h"
#include "interrupts.h"
#include "session.h"

namespace pi2::runner {

// GET /health, GET /v1/models, POST /v1/chat/completions, POST /v1/completions: answered one after the other, each as a
// line of --requests, until a signal comes. What a client asks that goes away is not answered any further. `ready` gets
// the address once clients are let in, standard error a line for each answer. Throws Problem: nobody can be let in.
void serve_http(Session& session, const Options& o, HttpServer& server,
                const std::function<void(const std::string&)>& ready);

}  // namespace pi2::runner
