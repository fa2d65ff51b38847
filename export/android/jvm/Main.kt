package org.torchpi2.jvm

import org.torchpi2.Bundle
import org.torchpi2.Message
import org.torchpi2.Request

/**
 * Continues a prompt greedily under a JVM, then answers questions as those of a talk: FOLDER PROMPT TOKENS [QUESTION...].
 * Prints the report of each answer as a line.
 */
fun main(arguments: Array<String>) {
    val (folder, prompt, tokens) = arguments
    val how = Request(maxNewTokens = tokens.toInt())
    Bundle(folder).use { bundle ->
        println(bundle.generate(how.copy(prompt = prompt)))
        var messages = listOf<Message>()
        for (question in arguments.drop(3)) {
            messages += Message("user", question)
            val answer = StringBuilder()
            println(bundle.generate(how.copy(messages = messages)) { answer.append(it) })
            messages += Message("assistant", answer.toString())
        }
    }
}
