package org.torchpi2.jvm

import org.torchpi2.Bundle
import org.torchpi2.Request

/** Continues a prompt greedily under a JVM: FOLDER PROMPT TOKENS. Prints the report. */
fun main(arguments: Array<String>) {
    val (folder, prompt, tokens) = arguments
    Bundle(folder).use { println(it.generate(Request(prompt, maxNewTokens = tokens.toInt()))) }
}
