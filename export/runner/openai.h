// Requests and answers in the shape of OpenAI's API: what a body says as a line of --requests (request_line.h), and
// what came of it.
#pragma once

#include <cstdint>
#include <string>

#include "fields.h"
#include "report.h"

namespace pi2::runner {

// Of one request.
struct Asked {
  Json line;           // for request_of
  bool chat = false;   // /v1/chat/completions, else /v1/completions
  bool usage = false;  // a stream ends with it
  std::string model;   // empty: any
};

// Throws Problem: a field is wrong, or asks for what is not done, or for more choices than there are lanes. Fields that
// nobody knows are left out of account.
Asked asked_of(const std::string& body, bool chat, int lanes);

// Answers to one request, by name of the model.
class OpenAiAnswer {
 public:
  OpenAiAnswer(const Asked& asked, std::string model, std::int64_t number);

  Json whole(const Run& run) const;
  // Pieces of a stream: before the first of all a chat has one that says who speaks.
  Json role(int choice) const;
  Json piece(int choice, const std::string& text) const;
  Json last(int choice, const Answer& answer) const;  // why it ended
  Json usage(const Run& run) const;                   // behind all others, if it is asked for

 private:
  Json with(const char* object, Json choices) const;
  Json chunk(int choice, Json said, Json reason) const;

  bool chat_;
  std::string id_, model_;
  std::int64_t created_;
};

}  // namespace pi2::runner
