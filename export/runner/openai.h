// OpenAI's API: converts request bodies to lines of --requests (request_line.h), and runs to answers.
#pragma once

#include <cstdint>
#include <string>

#include "fields.h"
#include "report.h"

namespace pi2::runner {

// One request.
struct Asked {
  Json line;           // for request_of
  bool chat = false;   // /v1/chat/completions, else /v1/completions
  bool usage = false;  // a stream ends with its usage
  std::string model;   // empty: any
};

// Throws Problem for invalid or unsupported fields, or more choices than lanes. Ignores unknown fields.
Asked asked_of(const std::string& body, bool chat, int lanes);

// Answers to one request, with the name of the model.
class OpenAiAnswer {
 public:
  OpenAiAnswer(const Asked& asked, std::string model, std::int64_t number);

  Json whole(const Run& run) const;
  // Pieces of a stream: a chat starts with one that gives the role.
  Json role(int choice) const;
  Json piece(int choice, const std::string& text) const;
  Json last(int choice, const Answer& answer) const;  // why it ended
  Json usage(const Run& run) const;                   // after all others, if requested

 private:
  Json with(const char* object, Json choices) const;
  Json chunk(int choice, Json said, Json reason) const;

  bool chat_;
  std::string id_, model_;
  std::int64_t created_;
};

}  // namespace pi2::runner
