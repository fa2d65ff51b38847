// Files that are written: whole or not at all, through links, and what is no regular file directly.
#include "io/output_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "tests/check.h"

namespace {

using pi2::OutputFile;

std::string content(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

mode_t mode_of(const std::string& path) {
  struct stat about;
  return lstat(path.c_str(), &about) == 0 ? about.st_mode : 0;
}

int files_in(const std::string& folder) {
  std::FILE* list = popen(("ls -A '" + folder + "' | wc -l").c_str(), "r");
  int count = -1;
  if (std::fscanf(list, "%d", &count) != 1) count = -1;
  pclose(list);
  return count;
}

std::string write(const std::string& path, const std::string& text) {
  OutputFile out;
  std::string wrong = out.open(path);
  if (wrong.empty()) wrong = out.write(text.data(), static_cast<std::int64_t>(text.size()));
  return wrong.empty() ? out.close() : wrong;
}

#define PI2_SAYS(found, expected) PI2_CHECK((found) == (expected), "found '%s'", (found).c_str())

void regular(const std::string& folder) {
  const std::string file = folder + "/file";
  {
    OutputFile out;
    PI2_SAYS(out.open(file), "");
    PI2_CHECK(out.seekable(), "regular");
    PI2_SAYS(out.write("xbcd", 4), "");
    PI2_SAYS(out.write_first("a", 1), "");
    PI2_CHECK(mode_of(file) == 0, "there before it is whole");
    PI2_SAYS(out.close(), "");
  }
  PI2_SAYS(content(file), "abcd");
  chmod(file.c_str(), 0640);
  PI2_SAYS(write(file, "new"), "");
  PI2_SAYS(content(file), "new");
  PI2_CHECK((mode_of(file) & 07777) == 0640, "permissions");
  {
    OutputFile left;
    PI2_SAYS(left.open(file), "");
    PI2_SAYS(left.write("half", 4), "");
  }
  PI2_SAYS(content(file), "new");
  PI2_CHECK(files_in(folder) == 1, "something is left");
  unlink(file.c_str());
}

// Of a process that ended within: the next one takes its place. Of one that goes on: the next one waits.
void one_at_a_time(const std::string& folder) {
  const std::string file = folder + "/file";
  for (const bool dies : {true, false}) {
    int ready[2];
    PI2_CHECK(pipe(ready) == 0, "pipe");
    const pid_t child = fork();
    if (child == 0) {
      OutputFile out;
      if (!out.open(file).empty() || !out.write("child", 5).empty() || ::write(ready[1], "x", 1) != 1) _exit(1);
      if (dies) _exit(0);
      usleep(100000);
      _exit(out.close().empty() ? 0 : 1);
    }
    char byte;
    PI2_CHECK(::read(ready[0], &byte, 1) == 1, "child");
    int status = 1;
    if (dies) waitpid(child, &status, 0);
    PI2_CHECK(mode_of(folder + "/.file.partial") != 0 && mode_of(folder + "/.file.lock") != 0, "what it writes");
    OutputFile out;
    PI2_SAYS(out.open(file), "");
    PI2_SAYS(content(file), dies ? "" : "child");
    if (!dies) waitpid(child, &status, 0);
    PI2_CHECK(status == 0, "child");
    PI2_SAYS(out.write("mine", 4), "");
    PI2_SAYS(out.close(), "");
    PI2_SAYS(content(file), "mine");
    PI2_CHECK(files_in(folder) == 1, "something is left");
    unlink(file.c_str());
    for (const int end : ready) ::close(end);
  }
}

void places(const std::string& folder) {
  const std::string link = folder + "/link", real = std::filesystem::canonical(folder);
  PI2_CHECK(symlink("none", link.c_str()) == 0, "link");
  PI2_SAYS(pi2::output_place(link), real + "/none");
  PI2_SAYS(pi2::output_place(folder + "/./none"), real + "/none");
  PI2_SAYS(pi2::output_place("/dev/stdout"), "-");
  unlink(link.c_str());
}

void links(const std::string& folder) {
  const std::string link = folder + "/link", other = folder + "/other", file = folder + "/sub/file";
  mkdir((folder + "/sub").c_str(), 0755);
  PI2_CHECK(symlink("other", link.c_str()) == 0 && symlink("sub/file", other.c_str()) == 0, "links");
  for (const char* text : {"made", "replaced"}) {  // the second time there is a file
    PI2_SAYS(write(link, text), "");
    PI2_CHECK(S_ISLNK(mode_of(link)) && S_ISLNK(mode_of(other)), "links stay");
    PI2_SAYS(content(file), text);
  }
  unlink(other.c_str());
  PI2_CHECK(symlink("link", other.c_str()) == 0, "a circle");
  PI2_SAYS(write(link, "x"), std::strerror(ELOOP));
  for (const auto& path : {link, other, file}) unlink(path.c_str());
  rmdir((folder + "/sub").c_str());
}

void others(const std::string& folder) {
  PI2_SAYS(write(folder, "x"), std::strerror(EISDIR));
  PI2_SAYS(write(folder + "/no/file", "x"), std::strerror(ENOENT));
  PI2_SAYS(write("/dev/full", "x"), std::strerror(ENOSPC));
  PI2_SAYS(write("/dev/null", "x"), "");
  PI2_CHECK(S_ISCHR(mode_of("/dev/null")) && S_ISCHR(mode_of("/dev/full")), "devices stay");
  const std::string link = folder + "/null";
  PI2_CHECK(symlink("/dev/null", link.c_str()) == 0, "link");
  PI2_SAYS(write(link, "x"), "");
  unlink(link.c_str());
  const std::string fifo = folder + "/fifo";
  PI2_CHECK(mkfifo(fifo.c_str(), 0600) == 0, "fifo");
  std::string read;
  std::thread reader([&] { read = content(fifo); });
  PI2_SAYS(write(fifo, "through"), "");
  reader.join();
  PI2_SAYS(read, "through");
  PI2_CHECK(S_ISFIFO(mode_of(fifo)), "a FIFO stays");
  unlink(fifo.c_str());
  PI2_CHECK(files_in(folder) == 0, "something is left");
}

// By "-" and by names of what it is sent to.
void standard_output(const std::string& folder) {
  const std::string sent = folder + "/sent";
  for (const std::string& name : {std::string("-"), std::string("/dev/stdout"), sent}) {
    std::fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
      const int file = open(sent.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
      dup2(file, STDOUT_FILENO);
      std::printf("before,");
      const bool good = write(name, "data,").empty() && std::printf("behind") > 0 && std::fflush(stdout) == 0;
      _exit(good ? 0 : 1);
    }
    int status = 1;
    waitpid(child, &status, 0);
    PI2_CHECK(status == 0, "%s", name.c_str());
    PI2_SAYS(content(sent), "before,data,behind");
  }
  unlink(sent.c_str());
}

}  // namespace

int main() {
  char folder[] = "/tmp/pi2_output.XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  regular(folder);
  one_at_a_time(folder);
  places(folder);
  links(folder);
  others(folder);
  standard_output(folder);
  rmdir(folder);
  return pi2_test::finish("test_output_file", 6);
}
