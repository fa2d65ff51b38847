// pi2_tokenize tokenizer.json: for every line of JSON from standard input, one line of output.
//   "text"    its token ids, including those before and after a text
//   [1, 2]    the text of these tokens
#include <iostream>
#include <string>

#include "tokenizer/tokenizer.h"

int main(int argc, char** argv) {
  using pi2::runner::Json;
  if (argc != 2) {
    std::cerr << "usage: pi2_tokenize tokenizer.json <lines\n";
    return 2;
  }
  try {
    const pi2::runner::Tokenizer tokenizer(argv[1]);
    for (std::string line; std::getline(std::cin, line);) {
      const Json given = Json::parse(line);
      if (given.is_string()) {
        std::cout << Json(tokenizer.encode(given.get<std::string>(), true)).dump() << '\n';
      } else {
        const auto ids = given.get<std::vector<std::int64_t>>();
        std::cout << Json(tokenizer.decode(ids.data(), ids.size())).dump() << '\n';
      }
    }
  } catch (const std::exception& error) {
    std::cerr << "pi2_tokenize: " << error.what() << '\n';
    return 2;
  }
  return 0;
}
